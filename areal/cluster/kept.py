"""A process that is started again when it dies: a bounded number of times in a row, with longer and longer pauses.

    kept = KeptProcess(scheduler, job, process, startup_s=300)         # a started process, and the job that would start it again
    reason = await kept.death()                                        # waits; ProcessDied with its last lines
    await kept.again()                                                 # up and ready; ProcessDied once it is given up

It decides nothing else: who uses the process says what its death means (rollout/weights.py, for inference servers), and
`unless_a_process_dies(…, spared=…)` leaves it to them. No torch.
"""

from __future__ import annotations

import asyncio
import time

from areal.base.errors import ProcessDied
from areal.cluster.scheduler import Job, Process, Scheduler

TRIES = 5
STEADY_S = 600.0  # one that has lived so long has all its tries again
LONGEST_PAUSE_S = 30.0


class KeptProcess:
    """One process of the run under one name, whichever of its lives it is in."""

    def __init__(self, scheduler: Scheduler, job: Job, process: Process, *, startup_s: float) -> None:
        """job: what starts it again; process: its first life, which has reported ready. startup_s: how long a start may take."""
        self.name = job.name
        self._scheduler = scheduler
        self._job = job
        self._process = process
        self._startup_s = startup_s
        self._ready_at = time.monotonic()
        self._tries = 0

    async def death(self) -> ProcessDied:
        """Waits until it has ended; how, and what it said last."""
        await self._process.wait()
        return self._process.death()

    async def again(self) -> None:
        """Start it until it reports ready; the first time at once. Raises ProcessDied when it has had its tries."""
        if time.monotonic() - self._ready_at >= STEADY_S:
            self._tries = 0
        last: Exception = self._process.death()
        while self._tries < TRIES:
            await asyncio.sleep(min(2.0**self._tries - 1, LONGEST_PAUSE_S))
            self._tries += 1
            try:
                await self._start()
            except (ProcessDied, OSError) as reason:  # OSError: no memory for another process, or no room for its files
                last = reason
            else:
                self._ready_at = time.monotonic()
                return
        raise ProcessDied(f"{self.name} was started again {TRIES} times in a row and did not stay. {last}")

    async def _start(self) -> None:
        [process] = await self._scheduler.start(self._job)
        try:
            await process.ready(self._startup_s)
        except ProcessDied:
            await process.stop()  # one that is only slow would be in the way of the next
            raise
        self._process = process
