"""A real store with one clock, and a short way to make ended sessions in it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from areal.base.types import Completion, Group, Interaction, Limits, Message, SessionRequest
from areal.rollout.batch import Recipe
from areal.rollout.batcher import Batcher
from areal.rollout.queue import GroupQueue
from areal.rollout.staleness import StalenessGate
from areal.store import open_store, store_url
from areal.store.base import Store
from tests.proxy.service import make_service

__all__ = ["make_service"]


@dataclass
class Played:
    """Plays whole sessions straight into the store, as a proxy would have recorded them."""

    store: Store
    number: int = 0

    async def session(
        self, task: str, *, version: int = 0, reward: float | None = 1.0, tokens: int = 3, tags: tuple[str, ...] = ()
    ) -> str:
        self.number += 1
        session = await self.store.sessions.begin(SessionRequest(task, f"key-{self.number}", "w0"))
        if tokens:
            await self.store.sessions.add(interaction(session.id, version=version, tokens=tokens, tags=tags))
            if reward is not None:
                await self.store.sessions.reward(session.id, reward, f"chatcmpl-{session.id}-0")
        await self.store.sessions.end(session.id, "ended")
        return session.id


def interaction(
    session_id: str, *, version: int = 0, tokens: int = 3, index: int = 0, tags: tuple[str, ...] = ()
) -> Interaction:
    return Interaction(
        id=f"chatcmpl-{session_id}-{index}",
        session_id=session_id,
        index=index,
        prompt_ids=np.arange(4, dtype=np.int32),
        completion=Completion(
            token_ids=np.arange(10, 10 + tokens, dtype=np.int32),
            logprobs=np.full(tokens, -0.5, np.float32),
            versions=np.full(tokens, version, np.int32),
            kept_mass=np.ones(tokens, np.float32),
            temperature=1.0,
            finish_reason="stop",
        ),
        messages=(Message("user", "2+2?"),),
        reply=Message("assistant", "4"),
        tags=tags,
    )


@pytest.fixture
async def store(tmp_path) -> AsyncIterator[Store]:
    async with await open_store(store_url(tmp_path / "store.sqlite")) as opened:
        yield opened


@pytest.fixture
def played(store: Store) -> Played:
    return Played(store)


@pytest.fixture
def wide(store: Store) -> Callable[[], Awaitable[None]]:
    """Opens admission for as many sessions as anybody wants."""

    async def opened() -> None:
        await store.training.set_limits(Limits(max_concurrent=64, max_lag=8, batch_groups=8))

    return opened


@pytest.fixture
def batching(store: Store) -> Callable[..., Awaitable[tuple[StalenessGate, Batcher]]]:
    """Opens a gate and a batcher on the store; call it again for the next life of the run."""

    async def open_batcher(
        *,
        batch: int = 2,
        max_lag: int = 2,
        n_samples: int = 1,
        stale: str = "drop",
        clip: float | None = None,
        informative: Callable[[Group], bool] | None = None,
        said: list[str] | None = None,
        **more: Any,
    ) -> tuple[StalenessGate, Batcher]:
        limits = Limits(max_concurrent=64, max_lag=max_lag, batch_groups=batch, n_samples=n_samples)
        gate = await StalenessGate.open(store.training, limits, incarnation="test")
        queue = GroupQueue(store, Recipe("individual", turn_discount=1.0, reward_clip=clip))
        say = print if said is None else said.append
        return gate, Batcher(
            queue, gate, store.training, batch_groups=batch, stale=stale, informative=informative, say=say, **more
        )

    return open_batcher
