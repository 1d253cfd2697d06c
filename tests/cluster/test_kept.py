"""A process that is kept alive: started again so many times in a row, then given up with its last words."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from areal.base.errors import ProcessDied
from areal.cluster import kept as module
from areal.cluster.kept import KeptProcess
from areal.cluster.local import LocalScheduler
from areal.cluster.scheduler import Job

MakeJob = Callable[..., Job]
BODY = """
def main(spec):
    if os.path.exists(spec.job["broken"]):
        raise ConfigError("the disk with the model is gone")
    report_ready(spec)
    time.sleep(120)
"""


async def test_a_process_is_started_again_and_given_up_when_it_does_not_come(
    tmp_path: Path, job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TRIES", 2)
    monkeypatch.setattr(module, "LONGEST_PAUSE_S", 0.01)
    broken = tmp_path / "broken"
    async with LocalScheduler(tmp_path / "run") as scheduler:
        mine = job("server-0", BODY, broken=str(broken))
        [process] = await scheduler.start(mine)
        await process.ready(60)
        kept, pids = KeptProcess(scheduler, mine, process, startup_s=60), [process.pid]
        for _ in range(2):
            os.kill(pids[-1], signal.SIGKILL)
            assert f"server-0 (pid {pids[-1]}) was killed by signal 9" in str(await kept.death())
            await kept.again()
            pids.append(scheduler._processes["server-0"].pid)
        assert len(set(pids)) == 3
        os.kill(pids[-1], signal.SIGKILL)
        await kept.death()
        with pytest.raises(
            ProcessDied, match=rf"started again 2 times in a row .* \(pid {pids[-1]}\) was killed by signal 9"
        ):
            await kept.again()  # it came each time, and did not stay

        monkeypatch.setattr(module, "STEADY_S", 0.0)
        await kept.again()  # what has lived long has all its tries again
        broken.touch()
        os.kill(scheduler._processes["server-0"].pid, signal.SIGKILL)
        await kept.death()
        with pytest.raises(ProcessDied, match=r"(?s)exited with code 2.*the disk with the model is gone"):
            await kept.again()
