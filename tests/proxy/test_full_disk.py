"""A disk that fills up under a running service: no new sessions, nothing lost, and on it goes when there is room again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal.base.types import Version
from tests.store.small_disk import Missing, SmallDisk, small_disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    try:
        with small_disk(tmp_path, mib=80) as disk:
            yield disk
    except Missing as reason:
        pytest.skip(str(reason))


async def test_a_full_disk_stops_new_sessions_and_loses_nothing(
    disk: SmallDisk, make_service: Any, eventually: Any
) -> None:
    service = await make_service()
    key = await service.start("running")
    await service.chat(key, "A")
    before = await service.start("before")
    await service.chat(before, "A")
    await service.end(before)
    [group] = await service.store.training.ready()

    disk.fill(leave_mib=20)  # little is left, and kept for those that run
    status, body, headers = await service.post("/rl/start_session", {"task_id": "new"})
    assert (status, headers["Retry-After"]) == (503, "5")
    assert "nearly full (20 MiB free): no session starts below 64 MiB" in body["error"]["message"]
    await service.chat(key, "A", "ok", "B")
    assert len(await service.recorded(key)) == 2

    disk.fill()  # nothing is left
    status, body, headers = await service.post("/rl/set_reward", {"reward": 1.0}, key)
    assert (status, headers["Retry-After"]) == (503, "5")
    assert "free space" in body["error"]["message"]
    call = asyncio.create_task(service.chat(key, "A", "ok", "B", "ok", "C"))
    step = asyncio.create_task(service.store.training.advance(Version(1, 1, "x"), [group.id]))
    await eventually(lambda: service.calls()["finished"] >= 4)  # the answer has been sampled
    await asyncio.sleep(0.2)
    assert not call.done(), "what is not on disk is not given out as finished"
    assert not step.done(), "the controller waits; it does not end"
    assert len(await service.recorded(key)) == 2, "reads go on"

    disk.free()
    answer = await call
    await step
    assert (await service.reward(key, 1.0))[0] == 200
    await service.end(key)
    await service.start("new")
    kept = await service.recorded(key)
    assert [one.id for one in kept][-1] == answer["id"]
    assert [one.reward for one in kept] == [None, None, 1.0]
    assert (await service.store.training.counts()).consumed == 1
