"""How each command-line agent is pointed at a base URL and asked one thing, without a terminal, a login or the internet.

    line = claude_code(folder, "2.1.332", prompt, url, key, home)
    done = line.run(home)

A configuration file is written where the agent has no other way; everything else is environment and arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.clients.live_run import Done, run_agent


@dataclass(frozen=True)
class CommandLine:
    """command: words; env: beside a bare PATH and HOME; path: folders that go first on PATH."""

    command: Sequence[str | Path]
    env: Mapping[str, str] = field(default_factory=dict)
    path: Sequence[Path] = ()

    def run(self, home: Path) -> Done:
        return run_agent(self.command, home=home, env=self.env, path=self.path)


def claude_code(
    folder: Path, prompt: str, url: str, key: str, *more: str, trusted: bool = True, **env: str
) -> CommandLine:
    """One headless task. The base URL has no /v1. trusted: it may run commands that change something.

    An empty value in env takes a variable out."""
    own = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    command = [_bin(folder, "claude"), "-p", prompt, "--model", "policy"]
    command += ["--allowedTools", "Bash,Agent,Task"] if trusted else []
    set_ = {name: value for name, value in (own | env).items() if value}
    return CommandLine([*command, "--output-format", "json", *more], set_)


def codex(folder: Path, prompt: str, url: str, key: str, home: Path) -> CommandLine:
    """One headless task; the provider stands in a file."""
    _write(
        home / ".codex" / "config.toml",
        f'model = "policy"\nmodel_provider = "gw"\n[model_providers.gw]\nname = "gw"\nbase_url = "{url}/v1"\n'
        'env_key = "GW_KEY"\nwire_api = "responses"\n',
    )
    words = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", prompt]
    return CommandLine([_bin(folder, "codex"), *words], {"GW_KEY": key})


def openclaw(folder: Path, node: Path, dialect: str, prompt: str, url: str, key: str, home: Path) -> CommandLine:
    """One headless task without its daemon. dialect: chat, responses or messages."""
    api = {"chat": "openai-completions", "responses": "openai-responses", "messages": "anthropic-messages"}[dialect]
    model = {
        "id": "policy",
        "name": "Policy",
        "reasoning": False,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "contextWindow": 128000,
        "maxTokens": 4096,
    }
    base = url if dialect == "messages" else f"{url}/v1"
    provider = {"baseUrl": base, "apiKey": key, "api": api, "models": [model]}
    config = {
        "models": {"mode": "replace", "providers": {"gw": provider}},
        "agents": {"defaults": {"model": {"primary": "gw/policy"}}},
    }
    _write(home / "openclaw.json", json.dumps(config))
    words = ["agent", "exec", prompt, "--config", home / "openclaw.json", "--cwd", home / "work"]
    return CommandLine(
        [_bin(folder, "openclaw"), *words, "--local-model-lean", "--json"], path=[node / "node_modules" / ".bin"]
    )


def opencode(folder: Path, dialect: str, prompt: str, url: str, key: str, home: Path) -> CommandLine:
    """One headless task. dialect: chat or messages; titles come from a second model name."""
    adapter = {"chat": "@ai-sdk/openai-compatible", "messages": "@ai-sdk/anthropic"}[dialect]
    limit = {"limit": {"context": 128000, "output": 4096}}
    config = {
        "provider": {
            "gw": {
                "npm": adapter,
                "options": {"baseURL": f"{url}/v1", "apiKey": key},
                "models": {"policy": limit, "policy-small": limit},
            }
        },
        "model": "gw/policy",
        "small_model": "gw/policy-small",
        "enabled_providers": ["gw"],
        "permission": {"bash": "allow"},
    }
    _write(home / ".config" / "opencode" / "opencode.json", json.dumps(config))
    quiet = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    return CommandLine([_bin(folder, "opencode"), "run", prompt], quiet)


def qwen_code(folder: Path, node: Path, prompt: str, url: str, key: str, home: Path) -> CommandLine:
    """One headless task."""
    settings = {"privacy": {"usageStatisticsEnabled": False}, "security": {"auth": {"selectedType": "openai"}}}
    _write(home / ".qwen" / "settings.json", json.dumps(settings))
    env = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key, "OPENAI_MODEL": "policy"}
    return CommandLine([_bin(folder, "qwen"), "-p", prompt, "--yolo"], env, path=[node / "node_modules" / ".bin"])


def _bin(folder: Path, name: str) -> Path:
    return folder / "node_modules" / ".bin" / name


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
