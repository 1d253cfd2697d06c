"""What ends a dispatcher, with a real store and a worker that is not there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import chain, count
from typing import Any

import pytest

from areal.base.errors import ProcessDied, TrainingError
from areal.rollout.datasets import Task
from areal.rollout.dispatcher import Dispatcher
from areal.web.client import JsonClient

NOBODY = "http://127.0.0.1:1"


async def test_T063_a_dead_worker_ends_the_run_with_its_death_and_not_with_what_followed(store, batching) -> None:
    gate, _ = await batching()

    async def watched(worker: JsonClient) -> None:
        async with Dispatcher([worker], gate, store.training, n_samples=8, tasks=more_tasks()) as dispatcher:
            async with asyncio.timeout(60):
                with pytest.raises(TrainingError, match=r"failed \d+ times in a row .* is not reachable"):
                    await dispatcher.failure()
            raise ProcessDied("worker-0 was killed")

    async with JsonClient(NOBODY) as worker:
        with pytest.raises(ProcessDied, match="worker-0 was killed"):
            await watched(worker)


def more_tasks() -> Iterator[Task]:
    return (Task(str(number), {}) for number in count())


class Recording:
    """In the place of a worker: keeps what it is asked, and answers at once that the agent did its work."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def post(self, path: str, body: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        self.asked.append(body)
        return {"session_id": "s", "reward": 1.0, "error": ""}


class Breaking(Recording):
    """One of its answers is a bug of ours; the others never come."""

    cut_off = False

    async def post(self, path: str, body: dict[str, Any], *, timeout_s: float) -> Any:
        if await super().post(path, body, timeout_s=timeout_s) and len(self.asked) == 2:
            raise ZeroDivisionError("a bug")
        try:
            await asyncio.Event().wait()
        finally:
            self.cut_off = True


async def test_T063_a_bug_in_the_run_of_an_agent_ends_the_run_and_stands_in_the_log(store, batching, caplog) -> None:
    gate, _ = await batching(batch=4)
    worker = Breaking()
    dispatcher = Dispatcher([worker], gate, store.training, n_samples=2, tasks=more_tasks())  # type: ignore[list-item]
    with pytest.raises(ZeroDivisionError, match="a bug"):
        async with asyncio.timeout(60), dispatcher:
            await dispatcher.failure()
    assert "the group of task '0' broke" in caplog.text
    assert "ZeroDivisionError: a bug" in caplog.text


async def test_a_bug_in_one_evaluation_ends_the_others_and_is_raised(store, batching) -> None:
    gate, _ = await batching()
    worker = Breaking()
    async with asyncio.timeout(60), Dispatcher([worker], gate, store.training, n_samples=1) as dispatcher:  # type: ignore[list-item]
        with pytest.raises(ZeroDivisionError, match="a bug"):
            await dispatcher.evaluate([Task("a", {}), Task("b", {})], label="eval-0")
        assert worker.cut_off


class Mumbling(Recording):
    async def post(self, path: str, body: dict[str, Any], *, timeout_s: float) -> Any:
        return {"session_id": "s"}


async def test_T063_a_worker_that_answers_something_else_counts_as_a_failed_run(store, batching) -> None:
    gate, _ = await batching()
    async with Dispatcher([Mumbling()], gate, store.training, n_samples=8, tasks=more_tasks()) as dispatcher:  # type: ignore[list-item]
        async with asyncio.timeout(60):
            with pytest.raises(TrainingError, match=r"first error: worker 0 answered something .*`reward`"):
                await dispatcher.failure()


async def test_a_task_id_that_stands_twice_in_the_file_starts_sessions_of_its_own_each_time(store, batching) -> None:
    """A request id names one session: the second task would get the first one's, which has ended, and never be tried."""
    gate, _ = await batching(batch=2, max_lag=0)
    worker = Recording()
    twice = chain([Task("a", {"x": 1}), Task("a", {"x": 2})], more_tasks())
    async with Dispatcher([worker], gate, store.training, n_samples=2, tasks=twice) as dispatcher:  # type: ignore[list-item]
        while len(worker.asked) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await dispatcher.evaluate([Task("a", {}), Task("a", {})], label="eval-0")
    assert [body["task"] for body in worker.asked[:4]] == [{"x": 1}] * 2 + [{"x": 2}] * 2
    names = [body["request_id"] for body in worker.asked]
    assert len(set(names)) == len(names)
    assert all(name.startswith("test:") for name in names), "of this life of the run"


async def test_the_end_of_a_run_does_not_wait_for_a_store_that_cannot_write(store, batching, monkeypatch) -> None:
    """The controller's writes have patience for a full disk; with the end, the next life of the run says it."""
    monkeypatch.setattr("areal.rollout.dispatcher.INTERRUPT_S", 0.05)
    gate, _ = await batching()
    asked = asyncio.Event()

    async def never(*_: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(store.training, "interrupt", never)
    async with asyncio.timeout(60):
        async with Dispatcher([Recording()], gate, store.training, n_samples=1, tasks=more_tasks()):  # type: ignore[list-item]
            pass
    assert asked.is_set()
