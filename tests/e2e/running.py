"""Commands as a user types them into a shell: a service that runs while a block does, and commands that run to their end.

    with service("python3 examples/openclaw/train.py …", log=folder / "logs" / "train.log") as run:
        run.url; run.line("train", step=0)          # waits for the line; the service ending first is a failure with what it said
    typed("curl …").stdout

They find the python of these tests first on their PATH, the repository as their folder, and no proxy for this machine.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from areal.base.logs import parse_line

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 240.0  # a bound for what hangs; no test waits for a clock


def environment(more: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return os.environ | {"PATH": path, "NO_PROXY": "127.0.0.1,localhost", "PYTHONUNBUFFERED": "1"} | dict(more)


def typed(
    command: str, *, env: Mapping[str, str] = MappingProxyType({}), cwd: Path = ROOT, within_s: float = WITHIN_S
) -> subprocess.CompletedProcess[str]:
    """One command line, or several, run by bash to the end."""
    return subprocess.run(
        ["bash", "-c", command], cwd=cwd, env=environment(env), capture_output=True, text=True, timeout=within_s
    )


@dataclass
class Running:
    """A service that was started by a command."""

    process: subprocess.Popen[bytes]
    log: Path
    output: Path

    @property
    def url(self) -> str:
        return self.text("Proxy gateway available at ").split("Proxy gateway available at ", 1)[1].split()[0]

    def text(self, wanted: str) -> str:
        """All of the log, once `wanted` stands in it."""
        deadline = time.monotonic() + WITHIN_S
        while not (self.log.exists() and wanted in (text := self.log.read_text())):
            assert self.process.poll() is None, f"it ended without {wanted!r}:\n{self.output.read_text()[-4000:]}"
            assert time.monotonic() < deadline, f"no {wanted!r} came:\n{self.output.read_text()[-4000:]}"
            time.sleep(0.05)
        return text

    def lines(self, part: str) -> list[dict[str, object]]:
        text = self.log.read_text() if self.log.exists() else ""
        parsed = map(parse_line, text.splitlines())
        return [line.facts for line in parsed if line is not None and line.part == part]

    def line(self, part: str, *, step: int) -> dict[str, object]:
        """That line, once it is there."""
        self.text(f"[{part}] step={step} ")
        return next(line for line in self.lines(part) if line["step"] == step)

    def end(self) -> int:
        """Its exit code, once it has ended by itself."""
        return self.process.wait(timeout=WITHIN_S)


@contextmanager
def service(command: str, *, log: Path, env: Mapping[str, str] = MappingProxyType({})) -> Iterator[Running]:
    """Started by bash in a group of its own, as a terminal does it; ended with SIGINT to the group, as Ctrl-C does, where it still runs."""
    with tempfile.TemporaryDirectory() as beside:
        output = Path(beside) / "output"
        with output.open("wb") as out:
            own = {"stdout": out, "stderr": subprocess.STDOUT, "env": environment(env), "start_new_session": True}
            process = subprocess.Popen(["bash", "-c", command], cwd=ROOT, **own)  # type: ignore[call-overload]
        try:
            yield Running(process, log, output)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
