"""Rewards that come from the run's own source, after the end: what waits, what its group does meanwhile, what a crash leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from areal.base.errors import AdmissionHeld, BadRequest, InvalidKey, NoCapacity, NotFound
from areal.base.types import Ending, Version
from areal.store.balance import Amounts
from areal.store.base import Retention


@pytest.fixture
async def scored(house: Any) -> Any:
    """Groups of two, rewarded by the run."""
    house.limits = replace(house.limits, n_samples=2, group_timeout_s=60, scored=True)
    await house.training.set_limits(house.limits)
    return house


async def waiting(house: Any) -> dict[str, bool]:
    return {one.session.id: one.closed for one in await house.store.rewards.waiting()}


async def fate(house: Any, session_id: str) -> str:
    summary = await house.store.reading.session(session_id)
    assert summary is not None
    return str(summary.fate)


async def check_books(house: Any) -> Any:
    books = await house.store.reading.balance()
    assert books.faults == ()
    return books


async def test_a_group_is_accepted_when_each_of_its_sessions_has_its_reward(scored: Any) -> None:
    first = await scored.play("a", reward=None, turns=2)
    assert first.awaits_reward_since == scored.clock.now
    assert await waiting(scored) == {"a": False}, "the other one of its group has not come yet"
    await scored.play("a", reward=None)
    assert await waiting(scored) == {"a": True, "a-1": True}
    assert await fate(scored, "a") == "waiting for its reward"
    counts = await scored.training.counts()
    assert (counts.running, counts.accepted, counts.awaiting_reward, counts.running_sessions) == (1, 0, 2, 0)
    books = await check_books(scored)
    assert books.awaiting_reward == Amounts(tokens=9, interactions=3, sessions=2)
    assert (books.open, books.rewarded, books.unrewarded) == (
        Amounts(tokens=9, interactions=3, sessions=2, groups=1), 0, 0,
    )  # fmt: skip
    assert await scored.store.rewards.write({"a": {None: 0.25}}) == ("a",)
    assert (await fate(scored, "a"), await scored.ready()) == ("waiting for its group", [])
    await scored.store.rewards.write({"a-1": {"a-1/0": 1.0}})
    assert await scored.ready() == [("a", ["a", "a-1"])]
    assert [one.reward for one in await scored.sessions.interactions("a")] == [None, 0.25]
    assert (await scored.sessions.get("a")).awaits_reward_since is None
    assert ((await check_books(scored)).waiting, await waiting(scored)) == (
        Amounts(tokens=9, interactions=3, sessions=2, groups=1), {},
    )  # fmt: skip


async def test_what_was_written_once_stays_as_it_is(scored: Any) -> None:
    """A controller that dies after the write and scores again changes nothing."""
    await scored.play("a", reward=None)
    await scored.play("a", reward=None)
    assert await scored.store.rewards.write({"a": {None: 1.0}, "a-1": None, "nobody": None}) == ("a", "a-1")
    assert await scored.store.rewards.write({"a": None, "a-1": {None: 9.0}}) == ()
    assert [one.reward for one in await scored.sessions.interactions("a")] == [1.0]
    assert [one.reward for one in await scored.sessions.interactions("a-1")] == [None]
    assert (await fate(scored, "a"), await fate(scored, "a-1")) == (
        "dropped (too_few_survivors)",
        "dropped (reward_failed)",
    )
    await check_books(scored)


async def test_a_failed_reward_drops_its_session_and_is_counted(scored: Any) -> None:
    for _ in range(2):
        await scored.play("all", reward=None)
    await scored.store.rewards.write({"all": None, "all-1": None})
    counts = await scored.training.counts()
    assert (counts.dropped, counts.dropped_tokens, counts.free_slots) == ({"reward_failed": 1}, 6, 4)
    assert await scored.store.reading.dropped_sessions() == {"reward_failed": 2}
    assert (await scored.store.reading.losses())[0].reason == "reward_failed"


async def test_a_verdict_is_written_whole_or_not_at_all(scored: Any) -> None:
    for _ in range(2):
        await scored.play("a", reward=None)
    write = scored.store.rewards.write
    with pytest.raises(BadRequest, match="finite number"):
        await write({"a": {None: 1.0}, "a-1": {None: float("nan")}})
    with pytest.raises(NotFound):
        await write({"a": {None: 1.0}, "a-1": {"a/0": 1.0}})
    assert await waiting(scored) == {"a": True, "a-1": True}
    assert [one.reward for one in await scored.sessions.interactions("a")] == [None]
    with pytest.raises(InvalidKey):  # nobody else rewards it any more
        await scored.sessions.reward("a", 1.0, None)


async def test_every_choice_of_the_last_answer_gets_its_reward(scored: Any) -> None:
    session = await scored.begin("a")
    for choice in range(2):
        await scored.sessions.add(scored.interaction(session.id, choice, name=f"x#{choice}"))
    await scored.sessions.end("a", "ended")
    await scored.store.rewards.write({"a": {None: 0.5}})
    assert [one.reward for one in await scored.sessions.interactions("a")] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("ending", "reward", "turns", "what"),
    [
        ("ended", None, 1, "waiting for its reward"),
        ("refreshed", None, 1, "waiting for its reward"),
        ("expired", None, 1, "waiting for its reward"),
        ("ended", 1.0, 1, "waiting for its group"),  # the admin key has rewarded it
        ("expired", None, 0, "dropped (empty)"),
        ("reward_failed", None, 1, "dropped (reward_failed)"),
        ("excluded", None, 1, "dropped (excluded)"),
    ],
)
async def test_which_endings_wait(scored: Any, ending: Ending, reward: float | None, turns: int, what: str) -> None:
    await scored.play("a", ending, reward, turns)
    assert await fate(scored, "a") == what
    assert list(await waiting(scored)) == (["a"] if "its reward" in what else [])
    await check_books(scored)


async def test_an_overdue_group_waits_for_rewards_and_then_for_nobody(scored: Any) -> None:
    """A slow judge costs no session; who runs on beyond the deadline is late, as ever."""
    scored.limits = replace(scored.limits, n_samples=3)
    await scored.training.set_limits(scored.limits)
    for _ in range(2):
        await scored.play("a", reward=None)
    straggler = await scored.begin("a")
    await scored.sessions.add(scored.interaction(straggler.id))
    assert await waiting(scored) == {"a": False, "a-1": False}
    scored.clock.now += 100
    assert (await scored.ready(), await waiting(scored)) == ([], {"a": True, "a-1": True})
    await scored.begin("other")  # settles what is overdue
    assert await fate(scored, "a") == "waiting for its reward"
    await scored.store.rewards.write({"a": {None: 1.0}})
    assert await scored.ready() == []
    await scored.store.rewards.write({"a-1": {None: 0.0}})
    assert await scored.ready() == [("a", ["a", "a-1"])]
    await scored.sessions.end(straggler.id, "ended")
    assert (await fate(scored, straggler.id), await waiting(scored)) == ("dropped (late)", {})
    await check_books(scored)


async def test_a_session_that_waits_can_be_excluded_and_deleted(scored: Any) -> None:
    for task in ("a", "a", "b", "b"):
        await scored.play(task, reward=None)
    await scored.sessions.exclude("a", "asked for")
    await scored.sessions.exclude("b", delete=True)
    assert list(await waiting(scored)) == ["a-1", "b-1"]
    assert await scored.store.rewards.write({"a": {None: 1.0}, "b": None}) == ()
    assert (await fate(scored, "a"), await fate(scored, "b")) == (
        "dropped (excluded)",
        "dropped (excluded), content deleted",
    )
    await check_books(scored)


async def test_what_waits_outlives_the_run_and_its_content(scored: Any, reopen: Any) -> None:
    await scored.play("a", reward=None)
    open_one = await scored.begin("a")
    assert (await scored.training.interrupt())["a"].missing == 1, "the one that waits keeps its place"
    assert (await scored.sessions.get(open_one.id)).ending == "expired"
    await scored.training.release_after(0, "the next life")
    async with await reopen() as again:
        [one] = await again.rewards.waiting()
    assert (one.session.id, one.closed) == ("a", False)
    trial = await scored.begin("trial", purpose="eval")
    await scored.sessions.add(scored.interaction(trial.id))
    await scored.sessions.end(trial.id, "ended")
    scored.clock.now += 1000
    assert await scored.store.upkeep.forget(Retention(seconds=1), 0) == 1, "the interrupted one alone"
    assert len(await scored.sessions.interactions("trial")) == 1


async def test_evaluation_is_rewarded_too_and_stands_apart(scored: Any) -> None:
    for name in ("trial", "gone"):
        await scored.begin(name, purpose="eval")
        await scored.sessions.add(scored.interaction(name))
        await scored.sessions.end(name, "ended")
    assert await waiting(scored) == {"trial": True, "gone": True}
    assert await fate(scored, "trial") == "evaluation, waiting for its reward"
    assert (await scored.training.counts()).awaiting_reward == 0
    await scored.sessions.exclude("gone", delete=True)
    await scored.store.rewards.write({"trial": {None: 0.75}, "gone": None})
    summary = await scored.store.reading.session("trial")
    assert (summary.fate, summary.reward, summary.drop_reason) == ("evaluation", 0.75, "")
    assert await waiting(scored) == {}
    assert (await check_books(scored)).evaluation == Amounts(tokens=6, interactions=2, sessions=2)


async def test_nothing_waits_where_clients_reward(house: Any) -> None:
    await house.play("a", reward=None)
    assert (await waiting(house), await fate(house, "a")) == ({}, "accepted")


async def test_while_admission_is_held_only_open_groups_fill(scored: Any) -> None:
    await scored.begin("a")
    await scored.training.set_limits(replace(scored.limits, held="judge_model is away; mend it"))
    with pytest.raises(AdmissionHeld, match="no session starts now: judge_model is away; mend it; retry in") as refused:
        await scored.begin("b")
    assert isinstance(refused.value, NoCapacity)
    assert (refused.value.status, refused.value.retry_after_s) == (429, 10)
    assert (await scored.training.counts()).free_slots == 0
    assert (await scored.begin("a")).id == "a-1", "half a group would be lost"
    assert (await scored.begin("e", purpose="eval")).purpose == "eval"
    await scored.training.set_limits(scored.limits)
    assert (await scored.begin("b")).id == "b"


async def test_a_step_takes_scored_sessions_alone(scored: Any) -> None:
    for _ in range(2):
        await scored.play("a", reward=None)
    await scored.store.rewards.write({"a": {None: 1.0}})
    running, accepted = await scored.training.occupancy()
    assert ([one.task_id for one in running], accepted) == (["a"], 0)
    assert not await scored.training.take(Version(1, 1, "x"), {running[0].id: ["a", "a-1"]})
