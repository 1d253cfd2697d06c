"""Old content goes beside training, never before a recovery state holds the step; the file shrinks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from areal.base.types import Completion, Interaction, Limits, Message, SessionRequest, Version
from areal.config.load import load_config
from areal.config.startable import why_not
from areal.rollout import retention
from areal.rollout.retention import Upholder, retention_of, safe_step
from areal.store import open_store, store_url
from areal.store.base import Retention


def large(session_id: str) -> Interaction:
    ids = np.random.default_rng(0).integers(0, 2**31, 20_000, np.int32)  # zstd makes nothing of it
    floats = ids.view(np.float32)
    done = Completion(ids, floats, ids, floats, 1.0, "stop")
    return Interaction(f"{session_id}/0", session_id, 0, ids, done, (), Message("assistant", "!"))


def on_disk(folder: Path) -> int:
    """The file and its log."""
    return sum(path.stat().st_size for path in folder.glob("store.sqlite*"))


async def test_the_file_shrinks_to_its_bound_while_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, bound = tmp_path / "store.sqlite", 2 * 2**20
    monkeypatch.setattr(retention, "safe_step", lambda _: 1)
    async with await open_store(store_url(path)) as store:
        await store.training.set_limits(Limits(max_concurrent=99, max_lag=0, batch_groups=99))
        for number in range(30):
            session = await store.sessions.begin(SessionRequest(f"t{number}", f"k{number}", "w0"))
            await store.sessions.add(large(session.id))
            await store.sessions.end(session.id, "ended")
        groups = [group.id for group in await store.training.ready()]
        await store.training.advance(Version(1, 1, "x"), groups)
        assert on_disk(tmp_path) > 10 * 2**20
        async with Upholder(store.upkeep, Retention(used_bytes=bound), tmp_path, period_s=0.01):
            while on_disk(tmp_path) > bound + 2**20:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        left = [number for number in range(30) if await store.sessions.interactions(f"t{number}")]
        assert left == [*range(left[0], 30)], "the oldest went"
        assert (await store.training.counts()).consumed == 30


async def test_a_checkpoint_that_cannot_be_read_just_now_delays_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mark = tmp_path / "step-000003" / "checkpoint.json"
    mark.mkdir(parents=True)
    async with await open_store(store_url(tmp_path / "store.sqlite")) as store:
        await store.training.set_limits(Limits(max_concurrent=99, max_lag=0, batch_groups=99))
        session = await store.sessions.begin(SessionRequest("t", "k", "w0", "eval"))
        await store.sessions.add(large(session.id))
        await store.sessions.end(session.id, "ended")
        async with Upholder(store.upkeep, Retention(seconds=0.0), tmp_path, period_s=0.01):
            while "old content is deleted later" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert await store.sessions.interactions(session.id)
            mark.rmdir()
            while await store.sessions.interactions(session.id):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


def test_without_a_recovery_state_nothing_trained_is_safe(tmp_path: Path) -> None:
    (tmp_path / "step-000003").mkdir()  # half-written
    assert safe_step(tmp_path) == 0


def test_the_bounds_are_the_configs_and_one_of_them_is_for_files() -> None:
    config = load_config(None, ["store.keep_steps=5", "store.keep_seconds=60", "store.keep_bytes=1000"])
    assert retention_of(config) == Retention(5, 60.0, 1000)
    config = load_config(None, ["store.keep_bytes=1000", "store.url=postgresql://host/db"])
    assert any("set store.keep_steps or store.keep_seconds" in reason for reason in why_not(config))


async def test_a_bug_in_it_ends_the_run_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Path) -> int:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(retention, "safe_step", broken)
    async with await open_store(store_url(tmp_path / "store.sqlite")) as store:
        with pytest.raises(ZeroDivisionError, match="a bug"):
            async with asyncio.timeout(60), Upholder(store.upkeep, Retention(steps=1), tmp_path, period_s=0.01):
                await asyncio.Event().wait()
