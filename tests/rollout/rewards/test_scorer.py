"""What waits is scored once, whatever the source does: slow, garbage, away, back; and whatever the controller does."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal.base.errors import AdmissionHeld, StoreUnready
from areal.base.types import SessionRequest
from areal.rollout.datasets import Task
from areal.rollout.rewards.case import Case
from areal.rollout.rewards.health import Health
from areal.rollout.rewards.source import Away, Hopeless, Rewards, Unreadable
from tests.rollout.conftest import Played, interaction
from tests.rollout.rewards.conftest import LIMITS, Scripted, one, until


async def waits(played: Played, task: str, **how: Any) -> str:
    await played.store.training.set_limits(replace(LIMITS, n_samples=how.pop("n_samples", 1)))
    return await played.session(task, reward=None, **how)


def away() -> Any:
    raise Away("answered 503: circuit open", "look at the channel")


async def test_sessions_are_scored_as_they_end_and_their_groups_accepted(scoring: Any, played: Played) -> None:
    seen: list[Case] = []

    def answer(cases: Sequence[Case]) -> list[Rewards]:
        seen.extend(cases)
        return [{None: 0.5}]

    async with scoring(Scripted(answer), tasks=[Task("known", {"gold": 4})], n_samples=2) as rig:
        for task in ("known@1", "known@1"):
            await played.session(task, reward=None)
        rig.gate.opened.clear()
        await rig.nothing_waits()
        [group] = await rig.store.training.ready()
        assert [one.id for one in group.sessions] == ["known@1", "known@1-1"]
        await asyncio.wait_for(rig.gate.opened.wait(), 60)  # a slot may have opened
    assert (await rig.store.sessions.interactions("known@1"))[0].reward == 0.5
    assert [(case.task, case.text, len(case.messages)) for case in seen] == [({"gold": 4}, "4", 2)] * 2


async def test_what_waited_when_the_controller_died_is_scored_by_the_next_one(scoring: Any, played: Played) -> None:
    source = Scripted(one(1.0))
    source.gate.clear()
    names = [await waits(played, f"t{number}") for number in range(3)]
    async with scoring(source) as rig:
        await until(lambda: asyncio.sleep(0, len(source.calls) == 3))
    assert await rig.waiting() == names, "its calls were cut off"
    source.gate.set()
    async with scoring(source) as rig:
        await rig.nothing_waits()
    assert len(await rig.store.training.ready()) == 3
    assert sorted(source.calls) == sorted([(name,) for name in names] * 2)
    async with scoring(source) as rig:
        await waits(played, "t4")
        await rig.nothing_waits()
    assert len(source.calls) == 7, "what is scored is not scored again"


async def test_garbage_is_asked_anew_and_then_dropped_as_failed_never_rewarded(
    scoring: Any, played: Played, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(cases: Sequence[Case]) -> list[Rewards]:
        if cases[0].session_id == "bad" or len(source.calls) < 2:
            raise Unreadable("there is no number in 'well'")
        return [{None: 1.0}]

    source = Scripted(answer)
    await waits(played, "good")
    await waits(played, "bad")
    async with scoring(source) as rig:
        await rig.nothing_waits()
        assert [await rig.fate(name) for name in ("good", "bad")] == ["accepted", "dropped (reward_failed)"]
    assert source.calls.count(("bad",)) == 3
    assert (await rig.store.sessions.interactions("bad"))[0].reward is None
    assert (await rig.store.training.counts()).dropped == {"reward_failed": 1}
    assert "no reward from judge_model (stub) for 1 session, dropped (reward_failed): there is no number" in caplog.text
    assert rig.said == []


async def test_a_session_that_nobody_can_reward_is_tried_once(scoring: Any, played: Played) -> None:
    def answer(cases: Sequence[Case]) -> list[Rewards]:
        raise Hopeless("the prompt is too long")

    source = Scripted(answer)
    await waits(played, "a")
    await waits(played, "no answer", tags=("aborted",))
    async with scoring(source) as rig:
        await rig.nothing_waits()
        assert [await rig.fate(name) for name in ("a", "no answer")] == ["dropped (reward_failed)"] * 2
    assert source.calls == [("a",)]


async def test_a_source_that_is_away_holds_admission_and_costs_nothing(scoring: Any, played: Played) -> None:
    down = True

    def answer(cases: Sequence[Case]) -> list[Rewards]:
        return away() if down else [{None: 1.0}]

    source = Scripted(answer, probed=lambda: away() if down else None)
    names = [await waits(played, f"t{number}") for number in range(3)]
    async with scoring(source, evaluation_s=3600.0) as rig:
        await until(lambda: asyncio.sleep(0, bool(rig.gate.limits.held)))
        with pytest.raises(
            AdmissionHeld, match=r"judge_model \(stub\) gives no rewards since .*503.*look at the channel"
        ):
            await rig.store.sessions.begin(SessionRequest("new", "k", "w"))
        probes = source.probes
        await until(lambda: asyncio.sleep(0, source.probes >= probes + 3))
        assert await rig.waiting() == names
        assert len(rig.said) == 1, "one sentence, not one for each look"
        assert "3 sessions wait for their reward, and nothing is dropped" in rig.said[0]
        async with asyncio.timeout(60):
            assert await rig.scorer.rewards_of(names) == {}, "an evaluation does not wait for it"
        down = False
        await rig.nothing_waits()
        await until(lambda: asyncio.sleep(0, len(rig.said) == 2))
        assert "answers again after" in rig.said[1]
        assert (await rig.store.sessions.begin(SessionRequest("new", "k", "w"))).id == "new"
    assert len(await rig.store.training.ready()) == 3


async def test_a_wrong_key_is_said_at_once_and_before_any_session(scoring: Any) -> None:
    def refused() -> None:
        raise Away("answered 401: bad key", "check api_gateway.api_key", wrong=True)

    source = Scripted(one(1.0), probed=refused)
    async with scoring(source, down_after_s=3600.0) as rig:
        await until(lambda: asyncio.sleep(0, len(rig.said) == 1))
        assert "check api_gateway.api_key" in rig.said[0]
        assert source.calls == []


async def test_a_session_that_alone_makes_a_good_source_fail_is_dropped(scoring: Any, played: Played) -> None:
    """A prompt that is too much for the judge times out each time, while others are answered."""

    def answer(cases: Sequence[Case]) -> list[Rewards]:
        return away() if cases[0].session_id == "poison" else [{None: 1.0}]

    source = Scripted(answer)
    await waits(played, "poison")
    async with scoring(source) as rig:
        await rig.nothing_waits()
        assert await rig.fate("poison") == "dropped (reward_failed)"
    assert (source.calls.count(("poison",)), rig.said) == (3, [])


async def test_a_function_that_is_away_for_one_session_stops_nobody(scoring: Any, played: Played) -> None:
    """It has no probe: the session itself is asked again, until another shows that the source is there."""

    def answer(cases: Sequence[Case]) -> list[Rewards]:
        return away() if cases[0].session_id == "poison" else [{None: 1.0}]

    source = Scripted(answer, has_probe=False)
    await waits(played, "poison")
    async with scoring(source) as rig:
        await until(lambda: asyncio.sleep(0, source.probes >= 3))
        assert rig.gate.limits.held == ""
        for number in range(6):
            if await rig.fate("poison") != "waiting for its reward":
                break
            await waits(played, f"t{number}")
            await until(lambda name=f"t{number}": _accepted(rig, name))
            await until(lambda: asyncio.sleep(0, source.probes >= 3))
        await rig.nothing_waits()
        assert await rig.fate("poison") == "dropped (reward_failed)"


async def test_a_call_that_fails_while_later_ones_are_answered_is_at_fault_itself(scoring: Any, played: Played) -> None:
    source = Scripted(lambda cases: away() if cases[0].session_id == "poison" else [{None: 1.0}], has_probe=False)
    source.gate.clear()
    await waits(played, "poison")
    async with scoring(source, attempts=1) as rig:
        await until(lambda: asyncio.sleep(0, source.calls == [("poison",)]))
        await waits(played, "later")
        await until(lambda: asyncio.sleep(0, len(source.calls) == 2))
        rig.scorer._health.answered(time.monotonic())  # as one that began later is
        source.gate.set()
        await rig.nothing_waits()
        assert await rig.fate("poison") == "dropped (reward_failed)"
    assert source.probes == 0


async def _accepted(rig: Any, name: str) -> bool:
    return await rig.fate(name) == "accepted"


async def test_a_function_that_is_away_for_several_is_waited_for(scoring: Any, played: Played) -> None:
    down = True

    def answer(cases: Sequence[Case]) -> list[Rewards]:
        return away() if down else [{None: 1.0}]

    source = Scripted(answer, has_probe=False)
    for name in ("a", "b"):
        await waits(played, name)
    async with scoring(source) as rig:
        await until(lambda: asyncio.sleep(0, bool(rig.gate.limits.held)))
        assert len(await rig.waiting()) == 2
        down = False
        await rig.nothing_waits()
        await until(lambda: asyncio.sleep(0, not rig.gate.limits.held))
    assert len(await rig.store.training.ready()) == 2


async def test_no_more_calls_at_once_than_allowed_and_none_while_it_is_away(scoring: Any, played: Played) -> None:
    source = Scripted(one(1.0))
    source.gate.clear()
    for number in range(6):
        await waits(played, f"t{number}")
    async with scoring(source, concurrency=2) as rig:
        await until(lambda: asyncio.sleep(0, source.at_once == 2))
        source.gate.set()
        await rig.nothing_waits()
    assert source.most_at_once == 2


async def test_a_group_is_scored_by_one_call_when_all_of_it_has_ended(scoring: Any, played: Played) -> None:
    source = Scripted(lambda cases: [{None: float(number)} for number in range(len(cases))])
    async with scoring(source, relative=True, n_samples=3) as rig:
        for _ in range(2):
            await played.session("a", reward=None)
        last = await rig.store.sessions.begin(SessionRequest("a", "last", "w"))
        await rig.store.sessions.add(interaction(last.id))
        await until(lambda: asyncio.sleep(0, len(rig.scorer._waiting) == 2))
        assert source.calls == []
        assert await rig.scorer.groups() == 0
        await rig.store.sessions.end(last.id, "ended")
        await rig.nothing_waits()
        [group] = await rig.store.training.ready()
    assert source.calls == [("a", "a-1", "a-2")]
    rewards = [(await rig.store.sessions.interactions(one.id))[0].reward for one in group.sessions]
    assert rewards == [0.0, 1.0, 2.0]


async def test_evaluation_has_its_rewards_from_the_source(scoring: Any, played: Played) -> None:
    def answer(cases: Sequence[Case]) -> list[Rewards]:
        if cases[0].session_id == "bad":
            raise Hopeless("no")
        return [{None: 0.75}]

    async with scoring(Scripted(answer)) as rig:
        for name in ("good", "bad"):
            session = await rig.store.sessions.begin(SessionRequest(name, name, "w", purpose="eval"))
            await rig.store.sessions.add(interaction(session.id))
            await rig.store.sessions.end(session.id, "ended")
        assert await rig.scorer.rewards_of(["good", "bad"]) == {"good": 0.75, "bad": None}


async def test_an_evaluation_waits_no_longer_than_it_may(scoring: Any, played: Played) -> None:
    source = Scripted(one(1.0))
    source.gate.clear()
    async with scoring(source, evaluation_s=0.3) as rig:
        session = await rig.store.sessions.begin(SessionRequest("slow", "slow", "w", purpose="eval"))
        await rig.store.sessions.add(interaction(session.id))
        await rig.store.sessions.end(session.id, "ended")
        assert await rig.scorer.rewards_of(["slow"]) == {}
        assert await rig.waiting() == ["slow"]


async def test_a_store_that_cannot_be_read_for_a_while_ends_nothing(
    scoring: Any, played: Played, tmp_path: Path
) -> None:
    source = Scripted(one(1.0))
    await waits(played, "a")
    with sqlite3.connect(tmp_path / "store.sqlite") as database:
        database.execute("ALTER TABLE recordings RENAME TO away")
    async with scoring(source) as rig:
        await asyncio.sleep(0.5)  # of five looks, none may end it
        assert source.calls == []
        with sqlite3.connect(tmp_path / "store.sqlite") as database:
            database.execute("ALTER TABLE away RENAME TO recordings")
        await rig.nothing_waits()
    assert source.calls == [("a",)]


async def test_a_full_disk_ends_no_run_whose_source_is_away() -> None:
    told: list[str] = []
    full = iter([True, False, True, False])

    async def hold(reason: str) -> None:
        if next(full):
            raise StoreUnready("the disk is full")
        told.append(reason)

    def probed() -> None:
        if not told:
            raise Away("refused", "look at the key", wrong=True)

    source = Scripted(one(1.0), probed=probed)
    health = Health(source, hold, down_after_s=0.2, say=lambda line: None, waiting=lambda: 0)
    await asyncio.wait_for(health.look(), 60)
    assert (len(told), told[-1]) == (2, ""), "held, and let go"


async def test_a_bug_ends_the_run_with_its_reason(scoring: Any, played: Played) -> None:
    def answer(cases: Sequence[Case]) -> list[Rewards]:
        raise ZeroDivisionError("a bug")

    await waits(played, "a")
    with pytest.raises(ZeroDivisionError, match="a bug"):
        async with asyncio.timeout(60), scoring(Scripted(answer)):
            await asyncio.Event().wait()  # whatever it waits for
