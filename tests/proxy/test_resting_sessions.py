"""Sessions that nobody calls are let go of: memory holds what is in use, the store holds everything."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from areal.config.rollout import AgentConfig
from areal.proxy.sessions import SessionPolicy, Sessions

SHORT = {"pieces": ["ok", "<|im_end|>"]}
RESTS_SOON = {"session_timeout_seconds": 1.0}  # in memory for a quarter of that


def stopped() -> float:
    """A clock of the store under which nothing ever expires."""
    return 1_000_000.0


def held(service: Any) -> int:
    return int(service.proxy.sessions.counts()["sessions"])


async def test_a_session_that_rests_is_let_go_of_and_goes_on_from_the_store(make_service: Any, eventually: Any) -> None:
    service = await make_service([SHORT], agent=RESTS_SOON, parts={"clock": stopped})
    key = await service.start()
    one = await service.chat(key, "hi")
    await eventually(lambda: held(service) == 0)
    await service.chat(key, "hi", "ok", "more")
    assert (await service.recorded(key))[1].token_parent == one["id"]
    assert (await service.end(key))["interaction_count"] == 2


async def test_a_session_in_use_is_held_however_long_the_call_takes(make_service: Any, eventually: Any) -> None:
    service = await make_service([SHORT], agent=RESTS_SOON, parts={"clock": stopped})
    key = await service.start()
    await service.engine.pause()
    call = asyncio.create_task(service.chat(key, "hi"))
    await eventually(lambda: service.calls()["running"] == 1)
    since = time.monotonic()
    await eventually(lambda: time.monotonic() - since > 1)
    await service.proxy.sessions.expire_idle()
    assert held(service) == 1
    await service.engine.resume()
    await call
    assert len(await service.recorded(key)) == 1


async def test_the_longest_unused_go_first_when_they_take_too_much_memory(make_service: Any) -> None:
    service = await make_service([SHORT])
    keys = [await service.start(f"task-{number}") for number in range(3)]
    for key in keys:
        await service.chat(key, "a word " * 1000)  # 7 KB of text and 28 KB of ids
    sessions = Sessions(service.store, service.keys, worker="w0", policy=SessionPolicy(resting_bytes=80_000))
    checked = [service.keys.check(key) for key in keys]
    for key in (checked[0], checked[1], checked[2]):
        live = await sessions.of(key)
        with live.calling(asyncio.current_task()):
            pass
    assert sessions.counts()["sessions"] == 3
    await sessions.expire_idle()
    assert sessions.counts()["sessions"] == 2
    assert await sessions.of(checked[2]) is live  # the last one used is still the same
    await sessions.of(checked[0])
    assert sessions.counts()["sessions"] == 3


async def test_whoever_keeps_a_place_for_a_session_hears_of_its_end_also_after_it_was_let_go_of(
    make_service: Any, eventually: Any
) -> None:
    ended: list[str] = []
    parts = {"clock": stopped, "on_session_end": ended.append}
    service = await make_service([SHORT], agent=RESTS_SOON, parts=parts)
    key = await service.start()
    await service.chat(key, "hi")
    await eventually(lambda: held(service) == 0)
    assert ended == []
    await service.end(key)
    assert ended == ["task"]


def test_a_session_rests_before_it_can_expire() -> None:
    for timeout_s in (0.1, 60.0, 3600.0):
        assert SessionPolicy.of(AgentConfig(session_timeout_seconds=timeout_s)).resting_s <= timeout_s / 4
