"""The same on the wall clock with the product's processes: rollout worker, gateway, and a server that plays each token at its time.

    ran = play(cell, max_lag=8, slots=11, train_seconds=2.25, warm_up=6, steps=12)

Lengths are 256 quantiles of the distribution, each a line of the script; a token lasts TOKEN_S. Training is a pause of the
controller; weights are published by the product's WeightPublisher to the real server (a label without weights).
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from areal.assemble import limits_of
from areal.base.background import background
from areal.cluster import start_scheduler
from areal.cluster.run_folder import RunFolder
from areal.config.load import load_config
from areal.launch import Launch
from areal.rollout.advisor import SpeedAdvisor
from areal.rollout.batch import Recipe
from areal.rollout.batcher import Batcher
from areal.rollout.datasets import Task
from areal.rollout.dispatcher import Dispatcher
from areal.rollout.queue import GroupQueue
from areal.rollout.staleness import StalenessGate
from areal.rollout.weights import WeightPublisher
from areal.store import open_store, store_url
from benchmarks.async_rig.loop import Driven, Ran, drive
from benchmarks.async_rig.workload import Cell, quantiles

UNIT_S = 1.5  # a mean length
TOKEN_S = UNIT_S / 20
LINES = 256


class Labels:
    """Stands where the publisher has the policy's rank: a version is a label."""

    async def publish(self, version: int, *, retire: list[int]) -> dict[str, Any]:
        return {"version": version}


def play(
    cell: Cell,
    *,
    max_lag: int,
    slots: int,
    train_seconds: float,
    warm_up: int,
    steps: int,
    training: float | None = None,
    seed: int = 1,
) -> Ran:
    """As virtual.play; too old tokens are dropped."""
    with tempfile.TemporaryDirectory(prefix="areal-async-") as folder:
        return asyncio.run(_play(Path(folder), cell, max_lag, slots, train_seconds, training, warm_up, steps, seed))


async def _play(
    root: Path,
    cell: Cell,
    max_lag: int,
    slots: int,
    train_seconds: float,
    training: float | None,
    warm_up: int,
    steps: int,
    seed: int,
) -> Ran:
    write_script(cell, root / "script.jsonl")
    config = load_config(
        None,
        [
            f"cluster.fileroot={root}",
            "rollout.backend=scripted:d1",
            f"rollout.scripted.path={root / 'script.jsonl'}",
            "rollout.agent.mode=inline",
            "rollout.agent.path=benchmarks.async_rig.agent:Timed",
            "rollout.agent.gateway_port=0",
            f"rollout.max_concurrent_rollouts={slots}",
            f"rollout.max_head_offpolicyness={max_lag}",
            f"train_dataset.batch_size={cell.per_step}",
        ],
    )
    run_folder = RunFolder.of(str(root), "async", "real", str(root / "run"), None)
    run_folder.create()
    async with AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(start_scheduler(config, run_folder))
        store = await stack.enter_async_context(await open_store(store_url(run_folder.store_path)))
        gate = await StalenessGate.open(store.training, limits_of(config), incarnation="real")
        launch = Launch(config, run_folder, scheduler, gate, None, "async", store_url(run_folder.store_path))
        await launch.servers_alone(stack)
        workers, _ = await launch.front(stack, attach=False)
        labels: Any = Labels()
        publisher = await stack.enter_async_context(WeightPublisher(labels, launch.servers, workers, gate))
        queue = GroupQueue(store, Recipe("individual", turn_discount=1.0))
        batcher = Batcher(queue, gate, store.training, batch_groups=cell.per_step, stale="drop", say=lambda _: None)
        own = {"generating": 1.0 - training, "training": training} if training else {"generating": 1.0, "training": 1.0}
        advisor = SpeedAdvisor(store.reading, gate, None, **own)
        dispatcher = await stack.enter_async_context(
            Dispatcher(workers, gate, store.training, n_samples=1, tasks=tasks(seed))
        )
        await stack.enter_async_context(background(dispatcher.failure(), name="what breaks the dispatcher"))

        async def train() -> None:
            await asyncio.sleep(train_seconds * UNIT_S)

        ran = await drive(Driven(batcher, store, dispatcher, advisor, train, publisher.publish), warm_up, steps)
    return replace(ran, seconds=ran.seconds / UNIT_S, longest=float(lengths(cell).max()))


def lengths(cell: Cell) -> np.ndarray:
    """Of each line, in mean lengths: whole tokens."""
    return np.maximum(1, np.round(quantiles(cell.cv, LINES) * UNIT_S / TOKEN_S)) * TOKEN_S / UNIT_S


def drawn(seed: int) -> Iterator[int]:
    """Which line each task asks for."""
    rng = np.random.default_rng(seed)
    while True:
        yield int(rng.integers(LINES))


def tasks(seed: int) -> Iterator[Task]:
    for number, line in enumerate(drawn(seed)):
        yield Task(f"task-{number}", {"line": line})


def write_script(cell: Cell, path: Path) -> None:
    """The last token of a line ends it."""
    with path.open("w") as file:
        for number, tokens in enumerate(np.round(lengths(cell) * UNIT_S / TOKEN_S).astype(int)):
            pieces = [*(["a"] * (int(tokens) - 1)), "<|im_end|>"]
            line = {"when": rf"line {number}\.", "pieces": pieces, "delay_ms": TOKEN_S * 1000}
            file.write(json.dumps(line) + "\n")
