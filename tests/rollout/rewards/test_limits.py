"""The gateway's own bounds against scoring: a minute that is spent is waited for, a budget that is spent holds admission."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from areal.base.errors import AdmissionHeld
from areal.base.types import SessionRequest
from areal.rollout.rewards.case import Case
from areal.rollout.rewards.health import Health
from areal.rollout.rewards.model_source import ModelSource
from areal.rollout.rewards.parsers import Reading
from areal.rollout.rewards.prompts import Asking
from areal.rollout.rewards.scorer import PATIENCE
from areal.rollout.rewards.source import Away, Crowded, Limited, Rewards, Spent
from areal.web.client import JsonClient
from tests.channel.stub import StubChannel, chat, error
from tests.gateway.channel_gateway import GUEST, channel_door, gateway_alone
from tests.rollout.conftest import Played
from tests.rollout.rewards.conftest import Scripted, one, until
from tests.rollout.rewards.test_scorer import waits
from tests.rollout.rewards.test_sources import case, config


@asynccontextmanager
async def judged_through_a_gateway(**route: Any) -> AsyncIterator[tuple[ModelSource, StubChannel]]:
    run = config(cache_size=0)
    with StubChannel(chat("correct")) as upstream:
        judge = {"model_id": "judge-large", **route}
        async with (
            channel_door(upstream.url, judge_model=judge, max_retries=0) as door,
            gateway_alone(door) as url,
            JsonClient(url, bearer=GUEST) as client,
        ):
            asking, reading = Asking.of(run), Reading.of(run)
            source = ModelSource(client, "judge_model", "m", asking, reading, timeout_s=30.0, cache_size=0)
            yield source, upstream


async def test_a_minute_that_is_spent_is_a_limit_with_its_wait() -> None:
    async with judged_through_a_gateway(calls_per_minute=1) as (source, upstream):
        await source.rewards([case()])
        for ask in (source.rewards([case()]), source.probe(None)):
            with pytest.raises(Limited, match="1 calls of this minute") as limited:
                await ask
            assert 1 <= limited.value.wait_s <= 60
    assert len(upstream.calls) == 1


async def test_a_budget_that_is_spent_is_away_with_a_sentence_of_its_own() -> None:
    async with judged_through_a_gateway(budget_tokens=10) as (source, upstream):
        await source.rewards([case()])
        with pytest.raises(Spent) as spent:
            await source.rewards([case()])
    assert spent.value.wrong, "no second look is needed"
    told = spent.value.told(source.name, "12:00:00")
    assert told.startswith(
        "the token budget of judge_model (m) is spent since 12:00:00, so no session is scored: judge_model has used 15"
    )
    assert "raise model_routing.judge_model.budget_tokens" in told
    assert len(upstream.calls) == 1


async def test_a_rate_limit_of_the_channel_itself_is_told_from_a_channel_that_is_away() -> None:
    async with judged_through_a_gateway() as (source, upstream):
        upstream.default = error(429, "slow down", retry_after="7")
        for ask in (source.rewards([case()]), source.probe(None)):
            with pytest.raises(Crowded, match=r"limits the rate of judge_model \(429: slow down\)") as crowded:
                await ask
            assert crowded.value.wait_s == 7
        told = crowded.value.told(source.name, "12:00:00")
        assert (told.startswith("judge_model (m) gives no rewards since 12:00:00 ("), crowded.value.wrong) == (
            True,
            False,
        )
        assert "set calls_per_minute of its route" in told
        upstream.default = error(402, "Insufficient Balance")
        with pytest.raises(Away, match="top up the account") as away:
            await source.rewards([case()])
        assert away.value.wrong, "no second look is needed"


def crowded(cases: Sequence[Case]) -> list[Rewards]:
    raise Crowded("the channel limits the rate of judge_model (429: slow down)", 0.0)


async def test_a_rate_limit_costs_no_session_its_attempts_while_others_are_answered(
    scoring: Any, played: Played
) -> None:
    """Each is refused more often than a source that is broken would be asked."""
    refused: Counter[str] = Counter()

    def answer(cases: Sequence[Case]) -> list[Rewards]:
        refused[cases[0].session_id] += 1
        return crowded(cases) if refused[cases[0].session_id] < 8 else [{None: 1.0}]

    names = [await waits(played, f"t{number}") for number in range(3)]
    async with scoring(Scripted(answer), attempts=2) as rig:
        await rig.nothing_waits()
        assert [await rig.fate(name) for name in names] == ["accepted"] * 3
        assert rig.said == []


async def test_a_session_that_alone_is_refused_for_the_rate_is_given_up_late(scoring: Any, played: Played) -> None:
    """A prompt larger than what the plan lets through in a minute is 429 for ever."""
    source = Scripted(lambda cases: crowded(cases) if cases[0].session_id == "poison" else [{None: 1.0}])
    await waits(played, "poison")
    async with scoring(source, attempts=2) as rig:
        await rig.nothing_waits()
        assert await rig.fate("poison") == "dropped (reward_failed)"
    assert (source.calls.count(("poison",)), rig.said) == (2 * PATIENCE, [])


async def test_a_rate_limit_that_lets_nobody_through_holds_admission_and_drops_nobody(
    scoring: Any, played: Played
) -> None:
    limited = True

    def answer(cases: Sequence[Case]) -> list[Rewards]:
        return crowded(cases) if limited else [{None: 1.0}]

    source = Scripted(answer, probed=lambda: answer([case()]) and None if source.calls else None)
    names = [await waits(played, f"t{number}") for number in range(3)]
    async with scoring(source, attempts=1) as rig:
        await until(lambda: asyncio.sleep(0, bool(rig.said)))
        assert "limits the rate of judge_model (429: slow down)); set calls_per_minute of its route" in rig.said[0]
        assert await rig.waiting() == names
        limited = False
        await rig.nothing_waits()
        assert [await rig.fate(name) for name in names] == ["accepted"] * 3


async def test_a_limit_is_waited_for_without_a_warning_and_holds_nobody(
    scoring: Any, played: Played, caplog: pytest.LogCaptureFixture
) -> None:
    """Two calls are granted at a time; the limit is there for longer than a source that is away would be waited for."""
    granted, refused = 2, 0

    def answer(cases: Sequence[Case]) -> list[Rewards]:
        nonlocal granted, refused
        if granted == 0:
            granted, refused = 2, refused + 1
            raise Limited("judge_model has had its 2 calls of this minute", 0.3)
        granted -= 1
        return [{None: 1.0}]

    caplog.set_level(logging.INFO, "areal.Rewards")
    source = Scripted(answer)
    names = [await waits(played, f"t{number}") for number in range(7)]
    async with scoring(source, concurrency=1, attempts=1, down_after_s=0.2) as rig:
        held = asyncio.create_task(until(lambda: asyncio.sleep(0, bool(rig.gate.limits.held))))
        await rig.nothing_waits()
        assert not held.done()
        held.cancel()
        assert [await rig.fate(name) for name in names] == ["accepted"] * 7
    assert (refused, source.probes, rig.said) == (3, 1, [])
    assert [record.levelname for record in caplog.records] == ["INFO"], caplog.text
    assert "scoring goes on as fast as judge_model (stub) may be asked" in caplog.text


async def test_those_that_wait_do_not_all_find_out_by_asking(scoring: Any, played: Played) -> None:
    def answer(cases: Sequence[Case]) -> list[Rewards]:
        raise Limited("its minute is spent", 3600.0)

    source = Scripted(answer)
    source.gate.clear()
    for number in range(12):
        await waits(played, f"t{number}")
    async with scoring(source, concurrency=4) as rig:
        await until(lambda: asyncio.sleep(0, len(rig.scorer._running) == 12 and source.at_once == 4))
        await asyncio.sleep(0.3)  # the others stand in line
        source.gate.set()
        await until(lambda: asyncio.sleep(0, source.at_once == 0))
        await asyncio.sleep(0.2)  # in which they would ask
        assert len(source.calls) == 4


async def test_a_budget_that_is_spent_is_the_fault_of_no_session() -> None:
    async def hold(reason: str) -> None:
        raise AssertionError(reason)

    health = Health(Scripted(one(1.0)), hold, down_after_s=60.0, say=print, waiting=lambda: 1)
    health.answered(time.monotonic())
    away = Away("answered 503", "look at the channel")
    assert await health.away(away, case(), 0.0), "others were answered meanwhile"
    assert not await health.away(Spent("it has used 30 tokens of its 20"), case(), 0.0)


async def test_a_limit_at_the_first_look_is_an_answer(scoring: Any, played: Played) -> None:
    def limited() -> None:
        raise Limited("its minute is spent", 0.2)

    await waits(played, "a")
    source = Scripted(one(1.0), probed=limited)
    async with scoring(source) as rig:
        await rig.nothing_waits()
    assert (source.probes, rig.said) == (1, [])


async def test_a_source_that_is_away_is_not_back_because_its_minute_is_spent(scoring: Any, played: Played) -> None:
    down, looks = True, 0

    def probed() -> None:
        nonlocal looks
        looks += 1
        if looks % 2 == 0:
            raise Limited("its minute is spent", 0.05)
        if down and looks > 1:
            raise Away("answered 503", "look at the channel")

    def answer(cases: Sequence[Case]) -> list[Rewards]:
        if down:
            raise Away("answered 503", "look at the channel")
        return [{None: 1.0}]

    source = Scripted(answer, probed=probed)
    await waits(played, "a")
    async with scoring(source, attempts=1) as rig:
        await until(lambda: asyncio.sleep(0, bool(rig.said)))
        seen = looks
        await until(lambda: asyncio.sleep(0, looks >= seen + 4))
        assert (len(rig.said), bool(rig.gate.limits.held)) == (1, True)
        down = False
        await rig.nothing_waits()
        assert await rig.fate("a") == "accepted"


async def test_a_budget_that_is_spent_holds_admission_and_drops_nobody(scoring: Any, played: Played) -> None:
    spent = True

    def refused() -> None:
        if spent:
            raise Spent("judge_model has used 30 tokens of its 20; raise model_routing.judge_model.budget_tokens")

    def answer(cases: Sequence[Case]) -> list[Rewards]:
        refused()
        return [{None: 1.0}]

    source = Scripted(answer, probed=lambda: refused() if source.calls else None)
    names = [await waits(played, f"t{number}") for number in range(3)]
    async with scoring(source, attempts=1, down_after_s=3600.0) as rig:
        await until(lambda: asyncio.sleep(0, bool(rig.said)))
        assert rig.said[0].startswith("the token budget of judge_model (stub) is spent since ")
        assert "3 sessions wait for their reward, and nothing is dropped" in rig.said[0]
        with pytest.raises(AdmissionHeld, match=r"token budget of judge_model \(stub\) is spent .*budget_tokens"):
            await rig.store.sessions.begin(SessionRequest("new", "k", "w"))
        assert await rig.waiting() == names
        spent = False
        await rig.nothing_waits()
        assert [await rig.fate(name) for name in names] == ["accepted"] * 3
