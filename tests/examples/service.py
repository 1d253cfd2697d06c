"""A run as a user starts it, with an example's own configuration and a script in the place of a model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from areal.base.types import Interaction
from areal.store import open_store, store_url
from areal.store.base import SessionSummary

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
LINE = "Proxy gateway available at "


class Running:
    """The service of one test. folder: its run folder."""

    def __init__(self, process: subprocess.Popen[str], folder: Path, environment: dict[str, str], logged: int) -> None:
        self.process, self.folder, self.environment = process, folder, environment
        self.url = self._gateway(logged)

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """A command beside the service, from the repository's root, by the interpreter of this test."""
        return subprocess.run(
            [sys.executable, *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=480,
            env={**self.environment, **environment},
            check=False,
        )

    def play(self, agent: str, tasks: str, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """`python -m examples.play`, as the examples' READMEs print it."""
        return self.run("-m", "examples.play", self.url, "--agent", agent, "--tasks", tasks, *flags, **environment)

    def sessions(self) -> list[tuple[SessionSummary, tuple[Interaction, ...]]]:
        """All of them, oldest first."""

        async def read() -> list[tuple[SessionSummary, tuple[Interaction, ...]]]:
            async with await open_store(store_url(self.folder / "store.sqlite")) as store:
                found = await store.reading.recent()
                return [(one, await store.sessions.interactions(one.session.id)) for one in reversed(found)]

        return asyncio.run(read())

    def stop(self) -> None:
        """Ctrl-C, as in a terminal."""
        self.process.send_signal(signal.SIGINT)
        output, _ = self.process.communicate(timeout=120)
        assert self.process.returncode == 0, output

    def wait(self) -> str:
        """Its output, once it has taken its steps."""
        output, _ = self.process.communicate(timeout=480)
        assert self.process.returncode == 0, output
        return output

    def _gateway(self, logged: int) -> str:
        """From the log, beyond the characters that a run before this one has left there."""
        log, deadline = self.folder / "logs" / "train.log", time.monotonic() + 120
        while LINE not in (text := _text(log)[logged:]):
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        return text.split(LINE, 1)[1].split()[0]


@contextmanager
def run(
    folder: Path, config: str, *overrides: str, script: Sequence[dict[str, Any]] | None = None, **environment: str
) -> Iterator[Running]:
    """`areal train --config examples/<config>`; with a script nothing is trained, what agents do is recorded."""
    words = [f"cluster.fileroot={folder}", "rollout.agent.gateway_port=0", *overrides]
    if script is not None:
        path = folder / "script.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in script))
        words += ["rollout.backend=scripted:d1", f"rollout.scripted.path={path}", "actor.path="]
    place = folder / "run"
    logged = len(_text(place / "logs" / "train.log"))
    env = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), **environment}
    process = subprocess.Popen(
        [sys.executable, "-m", "areal.train", "--config", str(EXAMPLES / config), "--output-dir", str(place), *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
    )
    try:
        yield Running(process, place, env, logged)
    finally:
        process.kill()
        process.communicate()


def _text(log: Path) -> str:
    return log.read_text() if log.exists() else ""


def calls(name: str, **arguments: Any) -> str:
    """A tool call as the scripted model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
