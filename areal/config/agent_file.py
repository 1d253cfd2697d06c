"""The agent file of `--agent-config`: a Python file that defines AGENT_CONFIG, as the agent itself imports it.

    AGENT_CONFIG = {"model_base_url": "http://localhost:9000/gateway/v1", "model_name": "default",
                    "api_key": "gateway-internal-token", "max_turns": 10,
                    "command": ["python", "agent.py", "{prompt}"], "tasks": "tasks.jsonl"}

Its api_key becomes the gateway's internal token, its URL says on which port the agent will knock. command and tasks are optional: with
them the run starts this agent itself, once per try of a task (docs/agents.md). tasks is what train_dataset.path may be, or a list of
texts and objects in the file itself. The file is the user's own code and is executed. Used by load.py, and by rollout/task_files.py for
such a list.
"""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from areal.base.errors import ConfigError
from areal.base.hosts import names_loopback
from areal.base.own_code import own_code
from areal.config.settings import AGENT_FILE, Setting, Settings

_KNOWN = ("model_base_url", "model_name", "api_key", "max_turns", "command", "tasks")
_PRINTED_PORT = 8080  # the second text prints this port, and the gateway's real one in a comment beside it
_GATEWAY_PORT = 9000


def read_agent_file(path: Path) -> tuple[Settings, list[str]]:
    """Settings under canonical names, and notes for the user. Raises ConfigError."""
    agent = _agent_config(path)
    settings: Settings = {}
    notes: list[str] = []

    def put(key: str, value: Any, name: str) -> None:
        settings[key] = Setting(value, AGENT_FILE, f"{path}: {name}")

    put("rollout.agent.mode", "online", "AGENT_CONFIG")
    if "api_key" in agent:
        put("rollout.agent.internal_token", agent["api_key"], "api_key")
    for name in ("max_turns", "model_name", "command"):
        if agent.get(name) is not None:
            put(f"rollout.agent.{name}", agent[name], name)
    if (tasks := agent.get("tasks")) is not None:
        put("train_dataset.path", tasks if isinstance(tasks, str) else str(path), "tasks")
    if "model_base_url" in agent:
        port, note = _port(str(agent["model_base_url"]), path)
        put("rollout.agent.gateway_port", port, "model_base_url")
        notes += note
    return settings, notes


def listed_tasks(path: Path) -> list[str | dict[str, Any]]:
    """The tasks that stand in the file itself. Raises ConfigError naming the one that is none."""
    tasks = _agent_config(path).get("tasks")
    if not isinstance(tasks, list | tuple):
        raise ConfigError(f'{path}: AGENT_CONFIG has no list of tasks; write "tasks": ["…", {{"prompt": "…"}}]')
    for number, task in enumerate(tasks):
        if not isinstance(task, str | dict):
            raise ConfigError(f"{path}: tasks[{number}] is {task!r:.80}; a task is a text or an object")
    return list(tasks)


def _agent_config(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        what = "is no file" if path.exists() else f"does not exist (looked in {Path.cwd()})"
        raise ConfigError(f"{path} {what}; --agent-config names a Python file")
    with own_code(str(path)):
        agent = runpy.run_path(str(path)).get("AGENT_CONFIG")
    if not isinstance(agent, Mapping):
        raise ConfigError(f"{path} defines no AGENT_CONFIG = {{...}}; known entries are {', '.join(_KNOWN)}")
    unknown = sorted(set(agent) - set(_KNOWN))
    if unknown:
        raise ConfigError(
            f"{path}: AGENT_CONFIG has unknown entries {', '.join(unknown)}; known are {', '.join(_KNOWN)}"
        )
    return agent


def _port(url: str, path: Path) -> tuple[int, list[str]]:
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        parts, port = urlsplit(""), 0
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"{path}: model_base_url {url!r} is no URL; write http://localhost:{_GATEWAY_PORT}/gateway/v1"
        )
    if not names_loopback(parts.hostname):
        raise ConfigError(
            f"{path}: model_base_url names host {parts.hostname}; a run serves its gateway on its own host: start the run "
            "there, or write localhost"
        )
    if port == _PRINTED_PORT:
        return _GATEWAY_PORT, [
            f"model_base_url {url} is not the gateway's address: agents use "
            f"http://{parts.hostname}:{_GATEWAY_PORT}/gateway/v1, and the run goes on with that"
        ]
    return port, []
