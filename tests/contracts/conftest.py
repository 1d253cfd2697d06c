"""Stores under contract tests: the whole table of them, each empty, open and with limits for four groups."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from areal.base.types import (
    Completion,
    Ending,
    Interaction,
    Limits,
    Message,
    Session,
    SessionRequest,
)
from areal.store import open_store, store_url
from areal.store.base import Store
from tests.store.postgres import PostgresServer

LIMITS = Limits(max_concurrent=4, max_lag=0, batch_groups=4)


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


class House:
    """A store with the test's own clock, and the few moves most tests make."""

    limits = LIMITS

    def __init__(self, store: Store, clock: Clock, url: str) -> None:
        self.store, self.clock, self.url, self.keys = store, clock, url, 0
        self.sessions, self.training = store.sessions, store.training

    def request(self, task: str = "task", **more: object) -> SessionRequest:
        self.keys += 1
        return replace(SessionRequest(task, f"key-{self.keys}", "w0"), **more)  # type: ignore[arg-type]

    async def begin(self, task: str = "task", **more: object) -> Session:
        return await self.sessions.begin(self.request(task, **more))

    async def play(self, task: str, ending: Ending = "ended", reward: float | None = 1.0, turns: int = 1) -> Session:
        session = await self.begin(task)
        for turn in range(turns):
            await self.sessions.add(self.interaction(session.id, turn))
        if reward is not None and turns:
            await self.sessions.reward(session.id, reward, None)
        return await self.sessions.end(session.id, ending)

    async def ready(self) -> list[tuple[str, list[str]]]:
        return [(group.task_id, [one.id for one in group.sessions]) for group in await self.training.ready()]

    @staticmethod
    def interaction(session_id: str, index: int = 0, *, name: str | None = None, tokens: int = 3) -> Interaction:
        completion = Completion(
            token_ids=np.arange(tokens, dtype=np.int32) + 2**30,
            logprobs=np.linspace(-3, -0.1, tokens, dtype=np.float32),
            versions=np.full(tokens, 7, np.int32),
            kept_mass=np.ones(tokens, np.float32),
            temperature=0.7,
            finish_reason="stop",
        )
        return Interaction(
            id=name or f"{session_id}/{index}",
            session_id=session_id,
            index=index,
            prompt_ids=np.array([1, 2, 3], np.int32),
            completion=completion,
            messages=(Message("user", "2+2?"),),
            reply=Message("assistant", "4"),
            finished_at=1000.0 + index,
        )


KINDS = ("sqlite", "postgres")
NUMBERS = itertools.count()


def new_store(kind: str, request: pytest.FixtureRequest, folder: Path) -> str:
    """The URL of a store of this kind that nobody has opened."""
    if kind == "postgres":
        server: PostgresServer = request.getfixturevalue("postgres")
        return server.url(f"contract_{next(NUMBERS)}")
    return store_url(folder / "store.sqlite")


@pytest.fixture(params=KINDS)
async def empty_house(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[House]:
    """A store that nobody has published limits to."""
    clock = Clock()
    url = new_store(request.param, request, tmp_path)
    async with await open_store(url, clock=clock) as store:
        yield House(store, clock, url)


@pytest.fixture
def reopen(empty_house: House) -> Callable[..., Awaitable[Store]]:
    """Opens the same store once more."""
    return lambda **how: open_store(empty_house.url, clock=empty_house.clock, **how)


@pytest.fixture
async def house(empty_house: House) -> House:
    await empty_house.training.set_limits(LIMITS)
    return empty_house
