"""The service's own agents where the run rewards by itself: evaluation takes the source's rewards, and no task is given out for a slot that a
group still holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from areal.base.errors import NoCapacity
from areal.base.types import SessionRequest
from areal.rollout.datasets import Task
from areal.rollout.dispatcher import Dispatcher
from areal.rollout.evaluation import Evaluation
from areal.rollout.rewards.case import Case
from areal.rollout.rewards.scorer import Scorer
from areal.rollout.rewards.source import Hopeless, Rewards
from areal.store.base import Store
from areal.web.client import UnexpectedAnswer
from tests.rollout.conftest import interaction
from tests.rollout.rewards.conftest import LIMITS, Scripted, one, until


class Worker:
    """In the place of a worker's HTTP client: an agent that plays one answer, or fails where its task says so."""

    def __init__(self, store: Store) -> None:
        self.store, self.asked = store, set[str]()

    async def post(self, path: str, body: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        self.asked.add(body["task_id"])
        request = SessionRequest(body["task_id"], body["request_id"], "w0", purpose=body["purpose"])
        try:
            session = await self.store.sessions.begin(request)
        except NoCapacity as full:
            raise UnexpectedAnswer("http://worker", full.status, str(full)) from None
        if body["task"].get("fails"):
            await self.store.sessions.end(session.id, "reward_failed")
            return {"session_id": session.id, "reward": None, "error": "ValueError: no"}
        await self.store.sessions.add(interaction(session.id))
        await self.store.sessions.end(session.id, "ended")
        return {"session_id": session.id, "reward": None, "error": ""}


async def test_an_evaluation_is_the_mean_of_what_the_source_rewarded(
    scoring: Any, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = [
        Task("good", {"worth": 1.0}),
        Task("half", {"worth": 0.5}),
        Task("bad", {}),
        Task("fails", {"fails": True}),
    ]

    def answer(cases: Sequence[Case]) -> list[Rewards]:
        if "worth" not in cases[0].task:
            raise Hopeless("no")
        return [{None: cases[0].task["worth"]}]

    async with scoring(Scripted(answer), tasks=tasks) as rig:
        async with Dispatcher([Worker(store)], rig.gate, store.training, n_samples=1) as dispatcher:  # type: ignore[list-item]
            evaluation = Evaluation(tasks, dispatcher, freq_steps=None, scorer=rig.scorer)
            assert (
                await evaluation.run(3) == 0.5
            )  # 1, 0.5 and the failed agent's 0; the one without a reward says nothing
            assert "1 held-out tasks got no reward and are left out of the mean" in caplog.text
            nobody = Evaluation([Task("bad", {})], dispatcher, freq_steps=None, scorer=rig.scorer)
            assert await nobody.run(4) is None


async def test_no_task_is_given_out_while_groups_that_wait_for_rewards_hold_the_slots(
    scoring: Any, store: Store
) -> None:
    def endless() -> Iterator[Task]:
        number = 0
        while True:
            number += 1
            yield Task(f"t{number}", {})

    source = Scripted(one(1.0))
    source.gate.clear()
    slots = min(LIMITS.max_concurrent, (LIMITS.max_lag + 1) * LIMITS.batch_groups)
    worker = Worker(store)
    async with scoring(source) as rig:
        async with Dispatcher(
            [worker],  # type: ignore[list-item]
            rig.gate, store.training, n_samples=1, tasks=endless(), unscored=rig.scorer.groups,
        ):  # fmt: skip
            await until(lambda: _holds(rig.scorer, slots))
            assert len(worker.asked) == slots, "there was no slot for more"
            source.gate.set()
            await until(lambda: _accepted(store, slots))


async def _holds(scorer: Scorer, groups: int) -> bool:
    return await scorer.groups() == groups


async def _accepted(store: Store, groups: int) -> bool:
    return (await store.training.occupancy())[1] == groups
