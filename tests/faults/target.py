"""A real training run on the tiny net, to be killed and started again: the same command each time, in the same folder.

    with Target(folder) as target:
        target.start(); target.until_ready()
        target.kill("rank"); code, said = target.until_ended()      # this ends the run; a server or a standing gateway that dies does not
        target.start()                                              # … and it is taken up again from its last checkpoint
        target.retries = 3                                          # lives from the next command on begin again by themselves

Its gateway keeps its port, so that clients keep their URL. It is either a process of the run, or stands by itself (`areal gateway`) and
outlives it: `stand(True)` before a start. A standing one that is killed is started again in place, the run goes on meanwhile. It also goes on
without its inference server, which it starts again by itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from tests.faults.service import ADMIN
from tests.ports import quiet_port

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("gateway", "worker", "server", "rank", "controller")
READY = "Proxy gateway available at "
BACK = " and is used again"
AGAIN = "The run begins again from"  # every process of the life before has ended
GROUPS, SAMPLES, SAVED_EVERY, LAG = 2, 2, 2, 4
SOON_S = 180.0  # generous: the machine may be busy; what is tested is that nothing hangs
CONFIG = [
    "experiment_name=kills",
    "trial_name=run",
    "total_train_steps=1000000",
    "actor.path=tiny-qwen3",
    "actor.threads=1",
    "actor.optimizer.lr=1e-4",
    "rollout.backend=native:d1",
    f"rollout.max_head_offpolicyness={LAG}",
    "rollout.native={threads: 1, max_context: 512, kv_tokens: 16384, max_batch: 64}",
    "rollout.agent.mode=online",
    f"rollout.agent.admin_api_key={ADMIN}",
    f"gconfig.n_samples={SAMPLES}",
    f"train_dataset.batch_size={GROUPS}",
    f"recover.freq_steps={SAVED_EVERY}",
    "evaluator.path=null",
]


class Target:
    """One run folder, and whatever of its processes lives now."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        self.port = quiet_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.environment = os.environ | {"XDG_STATE_HOME": str(folder / "state")}
        self.controller: subprocess.Popen[bytes] | None = None
        self.gateway: subprocess.Popen[bytes] | None = None  # a standing one
        self.retries = 0
        self.output = folder / "run.out"
        self._logged = self._printed = 0  # characters of the log and bytes of the output that former lives have left

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in filter(None, (self.controller, self.gateway)):
            process.kill()
            process.wait()
        for _, pid in self.processes():
            _kill(pid)

    def start(self) -> None:
        """The command of this run, and nothing waits for it."""
        log = self.run / "logs" / "train.log"
        self._logged = len(log.read_text()) if log.exists() else 0
        self._printed = self.output.stat().st_size if self.output.exists() else 0
        places = [f"cluster.fileroot={self.folder}", f"rollout.agent.gateway_port={self.port}"]
        settings = [*CONFIG, *places, f"recover.retries={self.retries}"]
        command = [sys.executable, "-m", "areal.train", *settings, "--output-dir", str(self.run)]
        self.controller = self._spawn(command, self.output)

    def until_ready(self, before: int = 0) -> bool:
        """Wait until clients reach it, more often than `before` since the command; False if it ended first."""
        wait_for(lambda: self.logged(READY) > before or self.ended, "its start")
        return not self.ended

    def until_begun_again(self, before: int) -> bool:
        """Wait until it has begun again by itself more often than `before`; False if it ended instead."""
        wait_for(lambda: self.logged(AGAIN) > before or self.ended, "the end of a life")
        return self.logged(AGAIN) > before

    def until_server_back(self, before: int) -> bool:
        """Wait until its inference server has come back more often than `before`; False if the run ended first."""
        wait_for(lambda: self.logged(BACK) > before or self.ended, "its inference server")
        return not self.ended

    def logged(self, what: str) -> int:
        """How often the run has said so since its command was given."""
        log = self.run / "logs" / "train.log"
        return log.read_text()[self._logged :].count(what) if log.exists() else 0

    def ends_without(self, kind: str) -> bool:
        """Whether the death of a process of this kind ends the life of the run once it is up."""
        return kind != "server" and not (kind == "gateway" and self.gateway is not None)

    @property
    def ended(self) -> bool:
        return self.controller is not None and self.controller.poll() is not None

    def until_ended(self) -> tuple[int, str]:
        """Its exit code and what this life has printed."""
        assert self.controller is not None
        code = self.controller.wait(timeout=SOON_S)
        return code, self.output.read_bytes()[self._printed :].decode(errors="replace")

    def stop(self) -> tuple[int, str]:
        """SIGTERM: it finishes its step, saves and ends."""
        assert self.controller is not None
        self.controller.send_signal(signal.SIGTERM)
        return self.until_ended()

    def stand(self, wanted: bool) -> None:
        """From now on there is a gateway beside the run, or none. Between two lives of the run only."""
        if wanted and self.gateway is None:
            log = self.folder / "gateway.out"
            known = log.stat().st_size if log.exists() else 0
            words = ["--port", str(self.port), "--log-dir", str(self.folder / "gateway")]
            self.gateway = self._spawn([sys.executable, "-m", "areal.gateway.server", *words], log)
            wait_for(lambda: b"Gateway ready at" in log.read_bytes()[known:] or self._gateway_ended(), "the gateway")
        elif not wanted and self.gateway is not None:
            self.gateway.terminate()
            self.gateway.wait(timeout=SOON_S)
            self.gateway = None

    def restart_gateway(self) -> None:
        """In the place of a standing one that was killed."""
        assert self.gateway is not None
        self.gateway.wait(timeout=SOON_S)
        self.gateway = None
        self.stand(True)

    def pid(self, kind: str) -> int | None:
        """Of the process of this kind that lives now."""
        if kind == "controller":
            return self.controller.pid if self.controller is not None and not self.ended else None
        if kind == "gateway" and self.gateway is not None:
            return self.gateway.pid if self.gateway.poll() is None else None
        return next((pid for name, pid in self.processes() if name.startswith(kind)), None)

    def processes(self) -> list[tuple[str, int]]:
        """(name, pid) of the run's own children that live, the orphans of a dead life among them."""
        found, place = [], f"{self.run}/processes/"
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                command = (entry / "cmdline").read_text().split("\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:  # it has just ended
                continue
            spec = next((word for word in command if word.startswith(place)), None)
            if spec and state not in "ZX":
                found.append((spec.removeprefix(place).partition(".")[0], int(entry.name)))
        return found

    def _gateway_ended(self) -> bool:
        assert self.gateway is not None
        assert self.gateway.poll() is None, (self.folder / "gateway.out").read_text()
        return False

    def _spawn(self, command: list[str], output: Path) -> subprocess.Popen[bytes]:
        with output.open("ab") as file:
            return subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, env=self.environment)


def kill_at_once(pids: list[int]) -> None:
    """SIGKILL to all of them, with nothing in between."""
    for pid in pids:
        _kill(pid)


def wait_for(condition: Callable[[], object], what: str, seconds: float = SOON_S) -> None:
    """Until it holds. Raises TimeoutError that says what did not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {seconds:.0f} s")
        time.sleep(0.05)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
