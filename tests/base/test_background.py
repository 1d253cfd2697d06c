"""What a block in the background does to its block, and the other way round."""

from __future__ import annotations

import asyncio

import pytest

from areal.base.background import background


async def forever(ended: list[str] | None = None) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        if ended is not None:
            ended.append("ended")


async def breaks(error: BaseException) -> None:
    raise error


async def test_it_is_stopped_where_its_block_ends() -> None:
    ended: list[str] = []
    async with background(forever(ended), name="work"):
        await asyncio.sleep(0)
    assert ended == ["ended"]


async def test_a_bug_in_it_ends_the_block_and_is_raised_with_its_cause() -> None:
    bug = ZeroDivisionError("a bug")
    bug.__cause__ = OSError("the cause")
    with pytest.raises(ZeroDivisionError) as raised:
        async with asyncio.timeout(60), background(breaks(bug), name="work"):
            await asyncio.Event().wait()
    assert raised.value is bug
    assert str(bug.__cause__) == "the cause"
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0, "who catches it goes on"


async def test_a_bug_while_it_is_stopped_is_raised_too() -> None:
    with pytest.raises(ZeroDivisionError):
        async with background(cleans_up_badly(), name="work"):
            await asyncio.sleep(0)


async def cleans_up_badly() -> None:
    try:
        await asyncio.Event().wait()
    finally:
        raise ZeroDivisionError


async def test_the_error_of_the_block_stays_what_it_is() -> None:
    ended: list[str] = []

    async def block() -> None:
        async with background(forever(ended), name="work"):
            await asyncio.sleep(0)
            raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        await block()
    assert ended == ["ended"]


async def test_of_several_tasks_in_it_the_first_error_is_raised() -> None:
    async def two() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(breaks(ZeroDivisionError("first")))
            group.create_task(forever())

    with pytest.raises(ZeroDivisionError, match="first"):
        async with asyncio.timeout(60), background(two(), name="work"):
            await asyncio.Event().wait()


async def test_who_cancels_the_block_cancels_it() -> None:
    ended: list[str] = []

    async def block() -> None:
        async with background(forever(ended), name="work"):
            await asyncio.Event().wait()

    task = asyncio.create_task(block())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["ended"]


async def test_work_that_comes_to_its_end_leaves_the_block_alone() -> None:
    async with background(asyncio.sleep(0), name="work"):
        await asyncio.sleep(0.01)
