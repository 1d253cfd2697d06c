"""The loop's own decisions; whole runs are in tests/e2e and tests/faults."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from areal.assemble import Run
from areal.base.types import Limits
from areal.rollout.datasets import Task
from areal.rollout.dispatcher import Dispatcher
from areal.rollout.evaluation import Evaluation
from areal.rollout.staleness import StalenessGate
from areal.store import open_store, store_url
from areal.train import evaluate


class Hanging:
    """In the place of a worker: an agent that never comes to its end."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def post(self, path: str, body: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError


async def test_a_run_that_is_asked_to_stop_does_not_wait_for_an_evaluation(tmp_path: Path) -> None:
    worker = Hanging()
    async with await open_store(store_url(tmp_path / "store.sqlite")) as store:
        gate = await StalenessGate.open(store.training, Limits(1, 0, 1), incarnation="test")
        async with Dispatcher([worker], gate, store.training, n_samples=1) as dispatcher:  # type: ignore[list-item]
            parts: dict[str, Any] = dict.fromkeys(Run.__dataclass_fields__)
            del parts["stopping"]
            evaluation = Evaluation([Task("held-out", {})], dispatcher, freq_steps=None)
            run = Run(**(parts | {"gate": gate, "evaluation": evaluation, "dispatcher": dispatcher}))
            trying = asyncio.create_task(evaluate(run, 0))
            async with asyncio.timeout(60):
                await worker.asked.wait()
                assert not trying.done()
                run.stopping.set()
                await trying
            await evaluate(run, 0, last=True)  # stopping: it is not tried again
