"""A real run for real agents: `areal train` with gateway, worker and inference server as processes of their own.

    with live_run(folder, ["rollout.backend=scripted:d1", …]) as run:
        session = run.start("task")
        ...                                     # an agent talks to run.url with session.key
        record = session.end()                  # ends the session; its export and what /rl/session says
    with agent_home() as home:
        done = run_agent([...], home=home, env={...})

An agent gets a home of its own and nothing of this process's environment; whatever it started has ended with it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from areal.cluster.process_tree import MARK, end, members

ROOT = Path(__file__).resolve().parents[2]
ADMIN = "sk-admin-of-the-client-tests"
START_S = 180.0
AGENT_S = 180.0
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Record:
    """What is left of a session: the answers of /rl/export_trajectories (concat) and of /rl/session."""

    export: dict[str, Any]
    summary: dict[str, Any]

    @property
    def interactions(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.export["interactions"]
        return found

    @property
    def rows(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.export["trajectories"]
        return found


@dataclass(frozen=True)
class Session:
    """A running session of a run."""

    url: str
    id: str
    key: str

    def reward(self, reward: float) -> None:
        post(self.url, "/rl/set_reward", {"reward": reward}, self.key)

    def end(self) -> Record:
        ended = post(self.url, "/rl/end_session", {}, self.key)
        summary = post(self.url, "/rl/session", {}, self.key)
        export = post(self.url, "/rl/export_trajectories", {"session_id": self.id, "style": "concat"}, ADMIN)
        assert ended["interaction_count"] == len(export["interactions"])
        return Record(export, summary)


@dataclass(frozen=True)
class Run:
    """A run that serves. folder: its run folder."""

    url: str
    folder: Path

    def start(self, task: str) -> Session:
        started = post(self.url, "/rl/start_session", {"task_id": task}, ADMIN)
        return Session(self.url, started["session_id"], started["api_key"])


def post(url: str, path: str, body: Any, key: str) -> dict[str, Any]:
    """The decoded answer. Raises urllib.error.HTTPError for another status than 200."""
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"authorization": f"Bearer {key}"})
    with _OPENER.open(request, timeout=60) as response:
        answer: dict[str, Any] = json.loads(response.read())
    return answer


@contextmanager
def live_run(folder: Path, overrides: Sequence[str]) -> Iterator[Run]:
    """A run that serves agents over HTTP until the end of the block; every process of it is gone then."""
    run_folder = folder / "run"
    own = ["rollout.agent.mode=online", "rollout.agent.gateway_port=0", f"rollout.agent.admin_api_key={ADMIN}"]
    command = [sys.executable, "-m", "areal.train", "--output-dir", str(run_folder), f"cluster.fileroot={folder}"]
    environment = os.environ | {"XDG_STATE_HOME": str(folder / "state")}
    with (folder / "stdout").open("w") as out:
        process = subprocess.Popen(
            [*command, *own, *overrides], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=environment
        )
    try:
        ready, deadline = run_folder / "processes" / "gateway.ready.json", time.monotonic() + START_S
        while not ready.exists():
            assert process.poll() is None, (folder / "stdout").read_text()
            assert time.monotonic() < deadline, (folder / "stdout").read_text()
            time.sleep(0.1)
        yield Run(json.loads(ready.read_text())["url"], run_folder)
        assert process.poll() is None, (folder / "stdout").read_text()
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        finally:
            process.kill()
            process.wait()


@contextmanager
def agent_home() -> Iterator[Path]:
    """An empty home for one agent, with `work/` as its working directory. Gone afterwards."""
    home = Path(tempfile.mkdtemp(prefix="areal-agent-"))
    try:
        work = home / "work"
        work.mkdir()
        (work / "hello.txt").write_text("hello from a file\n")
        yield home
    finally:
        deadline = time.monotonic() + 10
        while home.exists():  # a process that was killed a moment ago may still have written
            shutil.rmtree(home, ignore_errors=True)
            assert time.monotonic() < deadline, f"{home} cannot be removed"


@dataclass(frozen=True)
class Done:
    """How an agent ended. lingering: command lines of processes it had left behind; they are gone now."""

    code: int
    stdout: str
    stderr: str
    lingering: list[str]

    def explain(self) -> str:
        return f"exit {self.code}\n--- stdout\n{self.stdout[-4000:]}\n--- stderr\n{self.stderr[-4000:]}"


def run_agent(
    command: Sequence[str | Path],
    *,
    home: Path,
    env: Mapping[str, str] = MappingProxyType({}),
    path: Sequence[Path] = (),
    stdin: str = "",
) -> Done:
    """Run an agent to its end, at most AGENT_S seconds, in a clean environment. path: folders before /usr/bin."""
    mark = f"{uuid.uuid4().hex}:agent:"
    environment = {
        "PATH": os.pathsep.join([*map(str, path), "/usr/local/bin", "/usr/bin", "/bin"]),
        "HOME": str(home),
        "TERM": "dumb",
        "LANG": "C.UTF-8",
        "PYTHONUTF8": "1",
        MARK: mark,
        **env,
    }
    with subprocess.Popen(
        [str(word) for word in command],
        cwd=home / "work",
        env=environment,
        stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(stdin or None, timeout=AGENT_S)
        except subprocess.TimeoutExpired:
            end(mark, process.pid)
            stdout, stderr = process.communicate()
            stderr += f"\nthe agent did not end within {AGENT_S:.0f} s"
    left = _command_lines(members(mark))
    end(mark)
    return Done(process.returncode, stdout, stderr, left)


def _command_lines(pids: Sequence[int]) -> list[str]:
    """Of those that have not ended meanwhile."""
    lines = []
    for pid in pids:
        with suppress(psutil.Error):
            lines.append(" ".join(psutil.Process(pid).cmdline()))
    return lines
