"""What ends a dispatcher, with a real store and a worker that is not there."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

from areal.base.errors import ProcessDied, TrainingError
from areal.rollout.datasets import Task
from areal.rollout.dispatcher import Dispatcher
from areal.web.client import JsonClient

NOBODY = "http://127.0.0.1:1"


async def test_T063_a_dead_worker_ends_the_run_with_its_death_and_not_with_what_followed(store, batching) -> None:
    gate, _ = await batching()
    tasks = (Task(str(number), {}) for number in count())

    async def watched(worker: JsonClient) -> None:
        async with Dispatcher([worker], gate, store.training, n_samples=8, tasks=tasks) as dispatcher:
            async with asyncio.timeout(30):
                with pytest.raises(TrainingError, match=r"failed \d+ times in a row .* is not reachable"):
                    await dispatcher.failure()
            raise ProcessDied("worker-0 was killed")

    async with JsonClient(NOBODY) as worker:
        with pytest.raises(ProcessDied, match="worker-0 was killed"):
            await watched(worker)
