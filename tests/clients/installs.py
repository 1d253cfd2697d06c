"""Agents as their users install them: pinned, each in a folder of its own outside the repository, kept between runs.

    folder = install(CLAUDE_CODE)              # NotInstalled with the reason: the test is skipped and says it
    folder / "bin/python", folder / "node_modules/.bin/claude"

An entry is whole or counts as absent: it is built under a lock, and a file written last says that it is complete and with
which versions. So two test runs on one machine do not meet. Names of entries hold a digest of what is in them; to clean up,
remove `${XDG_CACHE_HOME:-~/.cache}/areal/test-clients`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

INSTALL_TIMEOUT_S = 300
COMPLETE = "complete.json"


class NotInstalled(Exception):
    """An agent cannot be had on this machine; the text says why."""


@dataclass(frozen=True)
class PythonAgents:
    """Distributions that live together in one virtual environment. packages: name (as pip writes it) -> version."""

    name: str
    packages: Mapping[str, str]
    extras: Mapping[str, str] = field(default_factory=dict)  # package -> extra

    def build(self, folder: Path) -> None:
        _run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
        wanted = [f"{name}{self._extra(name)}=={version}" for name, version in self.packages.items()]
        pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--disable-pip-version-check"]
        _run([*pip, "install", "--quiet", "--no-input", "--no-compile", *wanted])

    def versions(self, folder: Path) -> dict[str, str]:
        program = "import json, sys; from importlib.metadata import version as v; print(json.dumps({n: v(n) for n in sys.argv[1:]}))"
        found: dict[str, str] = json.loads(_run([str(folder / "bin" / "python"), "-c", program, *self.packages]))
        return found

    def _extra(self, name: str) -> str:
        return f"[{self.extras[name]}]" if name in self.extras else ""


@dataclass(frozen=True)
class NodeAgent:
    """Packages of an npm prefix. with_node: the prefix whose Node runs npm, and later the agent; None = this machine's."""

    name: str
    packages: Mapping[str, str]
    with_node: NodeAgent | None = None

    def build(self, folder: Path) -> None:
        if shutil.which("npm") is None:
            raise NotInstalled("npm is not on PATH; install Node.js 20 or newer")
        path = os.environ.get("PATH", "")
        if self.with_node is not None:
            path = f"{install(self.with_node) / 'node_modules' / '.bin'}{os.pathsep}{path}"
        wanted = [f"{name}@{version}" for name, version in self.packages.items()]
        quiet = ["--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error"]
        (folder / "package.json").write_text("{}\n")  # without one, npm would look for a project in the folders above
        _run(["npm", "install", "--prefix", str(folder), *quiet, *wanted], PATH=path)

    def versions(self, folder: Path) -> dict[str, str]:
        manifests = {name: folder / "node_modules" / name / "package.json" for name in self.packages}
        return {name: json.loads(path.read_text())["version"] for name, path in manifests.items()}


Agents = PythonAgents | NodeAgent

NODE_24 = NodeAgent("node", {"node": "24.21.0"})
CLAUDE_CODE = NodeAgent("claude-code", {"@anthropic-ai/claude-code": "2.1.332"}, with_node=NODE_24)
CLAUDE_CODE_197 = NodeAgent("claude-code", {"@anthropic-ai/claude-code": "2.1.197"})
CODEX = NodeAgent("codex", {"@openai/codex": "0.171.0"})
OPENCLAW = NodeAgent("openclaw", {"openclaw": "2026.9.6"}, with_node=NODE_24)
OPENCODE = NodeAgent("opencode", {"opencode-ai": "1.18.33"})
QWEN_CODE = NodeAgent("qwen-code", {"@qwen-code/qwen-code": "0.24.4"}, with_node=NODE_24)
PYTHON_AGENTS = PythonAgents(
    "python-agents",
    {
        "openai": "3.57.0",
        "anthropic": "2.14.0",
        "langchain": "1.5.2",
        "langchain-openai": "1.7.4",
        "langchain-anthropic": "1.7.10",
        "langgraph": "1.2.24",
        "openai-agents": "0.24.0",
        "pydantic-ai-slim": "2.68.0",
    },
    extras={"pydantic-ai-slim": "openai,anthropic"},
)


_outcomes: dict[Path, NotInstalled | None] = {}  # of this process


def cache_folder() -> Path:
    """Where installed agents are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "areal" / "test-clients"


def install(agents: Agents) -> Path:
    """The folder in which they are installed, in exactly these versions. Raises NotInstalled; the same reason again for
    every further test that wants them, without another try."""
    folder = cache_folder() / f"{agents.name}-{_digest(agents)}"
    if folder not in _outcomes:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _lock(folder.with_suffix(".lock")):
                if not (folder / COMPLETE).is_file():
                    _build(agents, folder)
            _outcomes[folder] = None
        except NotInstalled as reason:
            _outcomes[folder] = reason
        except (OSError, subprocess.SubprocessError) as error:
            _outcomes[folder] = NotInstalled(f"{agents.name} cannot be installed: {error}")
    reason = _outcomes[folder]
    if reason is not None:
        raise reason
    return folder


def _build(agents: Agents, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # what an interrupted build left
    folder.mkdir()
    agents.build(folder)
    found = agents.versions(folder)
    # npm resolves to an older release, or to an empty placeholder, where the newest does not fit this Node.
    if found != dict(agents.packages):
        raise NotInstalled(f"{agents.name}: the registry gave {found}, not {dict(agents.packages)}")
    (folder / COMPLETE).write_text(json.dumps(found, indent=2) + "\n")


def _digest(agents: Agents) -> str:
    parts = [sorted(agents.packages.items()), sys.version_info[:2] if isinstance(agents, PythonAgents) else ()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def _run(command: list[str], **environment: str) -> str:
    """Output of a command. Raises NotInstalled with its last lines when it fails."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )
    if done.returncode:
        raise NotInstalled(f"{' '.join(command[:4])} … failed: {(done.stderr or done.stdout).strip()[-600:]}")
    return done.stdout


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
