"""Starts the service's own agents as slots open: n_samples sessions for each task, on the worker with the fewest.

    async with Dispatcher(workers, gate, store.training, n_samples=8, tasks=tasks) as dispatcher: ...
    outcomes = await dispatcher.evaluate(held_out, label="eval-0")      # eval sessions, outside of the gate

workers: clients that carry the run's token. Without tasks (online agents start themselves) it only evaluates.

A run of an agent is one request to its worker that answers when the agent is done, so a dead worker or a failing agent is an
answer too. Admission stays with the store: the dispatcher only asks how many slots are free and never holds one.
An agent that never works ends the run with its first error (T063), not with silence, and so does a bug on the way to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Self

import msgspec

from areal.base.errors import ArealError, NoCapacity, TrainingError
from areal.rollout.datasets import Task
from areal.rollout.staleness import StalenessGate
from areal.store.admission import free_groups
from areal.store.base import TrainingStore
from areal.web.client import JsonClient, UnexpectedAnswer

FAILURES_IN_A_ROW = 32  # with not one success among them: the agent does not work
RETRY_S = 0.2
LONGEST_S = 24 * 3600.0  # of one run of an agent; its session times out long before
INTERRUPT_S = 10.0  # that the end of a run waits for the store

_log = logging.getLogger("areal.rollout")


class _Answer(msgspec.Struct, frozen=True):
    """What a worker says of a run (agent_runs.py)."""

    session_id: str
    reward: float | None
    error: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run of an agent came to. error: empty when it worked."""

    task_id: str
    session_id: str
    reward: float | None
    error: str


class Dispatcher:
    """Pushes tasks to workers while the gate has free slots. `async with` stops the runs it started."""

    def __init__(
        self,
        workers: Sequence[JsonClient],
        gate: StalenessGate,
        training: TrainingStore,
        *,
        n_samples: int,
        tasks: Iterator[Task] | None = None,
        eval_concurrency: int = 32,
        unscored: Callable[[], Awaitable[int]] | None = None,
    ) -> None:
        """unscored: groups whose agents are done and which hold their slots until they are rewarded."""
        self._workers = workers
        self._load: Counter[int] = Counter(dict.fromkeys(range(len(workers)), 0))
        self._gate = gate
        self._training = training
        self._tasks = tasks
        self._n_samples = n_samples
        self._unscored = unscored
        self._eval_slots = asyncio.Semaphore(eval_concurrency)
        self._runs: set[asyncio.Task[None]] = set()
        self._feeder: asyncio.Task[None] | None = None
        self._failed_in_a_row: list[str] = []
        self._bug: BaseException | None = None  # of a run; the feeder raises it
        self._numbers = count()  # of runs: a task id that stands in the file twice is two tasks

    async def __aenter__(self) -> Self:
        if self._tasks is not None:
            self._feeder = asyncio.create_task(self._feed(self._tasks), name="dispatcher")
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Cancel what runs and start nothing more; what is cut off is interrupted, and given out again where the run goes on."""
        self.stop_feeding()
        if self._tasks is not None:
            # The next life of the run says it too; here it would hide why this one ends, and a full disk would hold it.
            with suppress(ArealError, TimeoutError):
                async with asyncio.timeout(INTERRUPT_S):
                    await self._training.interrupt()
        running = [task for task in (self._feeder, *self._runs) if task is not None]
        for task in running:
            task.cancel()
        for task in running:
            with suppress(asyncio.CancelledError, ArealError):  # `failure` tells it; here it hides why the run ends
                await task
        self._feeder = None

    def stop_feeding(self) -> None:
        """Start no more training tasks; those that run go on, and evaluation still works."""
        if self._feeder is not None:
            self._feeder.cancel()

    async def failure(self) -> None:
        """Returns never; raises when the feeder fails."""
        if self._feeder is not None:
            await asyncio.shield(self._feeder)
        await asyncio.Event().wait()

    async def evaluate(self, tasks: Sequence[Task], *, label: str) -> list[Outcome]:
        """Each task once, as an eval session (never trained, not gated), bounded in number at once."""

        async def one(task: Task) -> Outcome:
            async with self._eval_slots:
                return await self._run(Task(f"{task.id}.{label}", task.data), purpose="eval")

        return await self._all(one(task) for task in tasks)

    @staticmethod
    async def _all(runs: Iterable[Coroutine[Any, Any, Outcome]]) -> list[Outcome]:
        """What each came to, in their order; a bug in one ends the others."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(run) for run in runs]
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _feed(self, tasks: Iterator[Task]) -> None:
        while True:
            self._gate.opened.clear()
            if self._bug is not None:
                raise self._bug
            if len(self._failed_in_a_row) >= FAILURES_IN_A_ROW:
                raise TrainingError(
                    f"the agent failed {len(self._failed_in_a_row)} times in a row without one success; "
                    f"first error: {self._failed_in_a_row[0]}"
                )
            _, accepted = await self._training.occupancy()
            running = len(self._runs) + (await self._unscored() if self._unscored is not None else 0)
            for _ in range(free_groups(self._gate.limits, running=running, accepted=accepted)):
                task = next(tasks)
                run = asyncio.create_task(self._group(task), name=f"the group of task {task.id!r}")
                self._runs.add(run)
                run.add_done_callback(self._finished)
            await self._gate.opened.wait()

    def _finished(self, run: asyncio.Task[None]) -> None:
        self._runs.discard(run)
        if not run.cancelled() and (bug := run.exception()) is not None:
            _log.error("%s broke", run.get_name(), exc_info=bug)
            self._bug = self._bug or bug
        self._gate.opened.set()

    async def _group(self, task: Task) -> None:
        for outcome in await self._all(self._run(task) for _ in range(task.samples or self._n_samples)):
            if outcome.error:
                self._failed_in_a_row.append(outcome.error)
            else:
                self._failed_in_a_row.clear()

    async def _run(self, task: Task, purpose: str = "train") -> Outcome:
        index = min(self._load, key=lambda worker: (self._load[worker], worker))
        self._load[index] += 1
        body: dict[str, Any] = {
            "task_id": task.id,
            "task": task.data,
            "purpose": purpose,
            "request_id": f"{self._gate.current.incarnation}:{next(self._numbers)}",
        }
        try:
            while True:
                try:
                    said = await self._workers[index].post("/agents/run", body, timeout_s=LONGEST_S)
                    answer = msgspec.convert(said, _Answer)
                    return Outcome(task.id, answer.session_id, answer.reward, answer.error)
                except UnexpectedAnswer as error:
                    if error.answered != NoCapacity.status:
                        raise
                    await asyncio.sleep(RETRY_S)  # someone else's group took the slot
        except msgspec.ValidationError as error:
            return Outcome(task.id, "", None, f"worker {index} answered something that is no end of a run: {error}")
        except ArealError as error:
            return Outcome(task.id, "", None, str(error))
        finally:
            self._load[index] -= 1
