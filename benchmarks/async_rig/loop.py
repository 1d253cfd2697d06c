"""The loop of areal/train.py without its reports, and what it measures.

ran = await drive(Driven(batcher, store, dispatcher, advisor, train, publish), warm_up=10, steps=16)
ran.per_second, ran.dropped, ran.predicted
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np

from areal.base.types import Version
from areal.rollout.account import settle
from areal.rollout.advisor import SpeedAdvisor
from areal.rollout.batcher import Batcher
from areal.rollout.dispatcher import Dispatcher
from areal.store.base import Store


@dataclass(frozen=True, slots=True)
class Ran:
    """seconds: of the measured steps. dropped: trajectories by reason over the whole run; masked_tokens: the
    part of the trained trajectories' tokens that was too old. longest: of the lengths that were drawn. predicted: the gain that the
    run's own speed advisor finds in its last steps."""

    steps: int
    trained: int
    seconds: float
    ended: int
    dropped: dict[str, int]
    masked_tokens: float
    lag_mean: float
    lag_max: int
    longest: float
    predicted: float

    @property
    def per_second(self) -> float:
        return self.trained / self.seconds


@dataclass(frozen=True, slots=True)
class Driven:
    """What the loop drives. train: takes a step's time; publish: serves the version that it made and moves the gate on."""

    batcher: Batcher
    store: Store
    dispatcher: Dispatcher
    advisor: SpeedAdvisor
    train: Callable[[], Awaitable[None]]
    publish: Callable[[list[str]], Awaitable[Version]]


async def drive(run: Driven, warm_up: int, steps: int) -> Ran:
    """Train so many steps and measure those after the warm-up. `longest` is the caller's to fill in."""
    clock = asyncio.get_running_loop().time
    training = run.store.training
    trained, lags, started = 0, [], clock()
    for step in range(warm_up + steps):
        if step == warm_up:
            started = clock()
        batch = await run.batcher.next_batch()
        begun = clock()
        await run.train()
        await settle(training, batch)
        await run.publish(batch.group_ids)
        run.advisor.trained(clock() - begun, groups=len(batch.groups))
        if step >= warm_up:
            trained += batch.sessions
            lags.append((batch.lag_mean, batch.lag_max))
    seconds = clock() - started
    run.dispatcher.stop_feeding()
    counts, advised = await training.counts(), await run.advisor.measure()
    return Ran(
        steps=steps,
        trained=trained,
        seconds=seconds,
        ended=counts.accepted + counts.consumed + sum(counts.dropped.values()),
        dropped=dict(counts.dropped),
        masked_tokens=counts.masked_tokens / (counts.trained_tokens + counts.masked_tokens),
        lag_mean=float(np.mean([mean for mean, _ in lags])),
        lag_max=max(most for _, most in lags),
        longest=math.nan,
        predicted=advised.speed.gain if advised else math.nan,
    )
