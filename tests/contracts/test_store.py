"""What every store promises: who may start, groups, capacity, opening, concurrency. `house` is in conftest.py."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal.base.errors import (
    BadRequest,
    ConfigError,
    Conflict,
    InvalidKey,
    NoCapacity,
    NotFound,
    Unavailable,
)
from areal.base.types import (
    Limits,
    Version,
    WorkerInfo,
)
from areal.store import open_store
from areal.store.base import Given

# -- begin -----------------------------------------------------------------------------------------


async def test_a_taken_task_id_gets_the_next_free_suffix(house: Any) -> None:
    await house.training.set_limits(replace(house.limits, max_lag=1))
    ids = [(await house.play(task)).id for task in ("a", "a", "a-2", "a", "a-2")]
    assert ids == ["a", "a-1", "a-2", "a-3", "a-2-1"]
    assert [session for _, [session] in await house.ready()] == ids


async def test_before_limits_nothing_starts_and_while_draining_only_evaluation(empty_house: Any) -> None:
    house = empty_house
    with pytest.raises(Unavailable, match="still starting"):
        await house.begin()
    await house.training.set_limits(replace(house.limits, n_samples=2))
    started = await house.begin(request_id="r1")
    await house.training.set_limits(replace(house.limits, n_samples=2, accepting=False))
    with pytest.raises(Unavailable, match="draining"):
        await house.begin()
    assert (await house.begin(purpose="eval")).purpose == "eval"  # the run's own last look at itself
    assert (await house.begin(request_id="r1")).id == started.id  # an answer that was lost is given again
    assert (await house.sessions.end(started.id, "ended")).ending == "ended"


async def test_limits_under_which_nothing_can_start_are_refused(house: Any) -> None:
    for bad in ({"max_concurrent": 0}, {"max_lag": -1}, {"batch_groups": 0}, {"n_samples": 0}, {"group_timeout_s": 0}):
        with pytest.raises(ConfigError, match="must be"):
            await house.training.set_limits(replace(house.limits, **bad))
    assert await house.training.limits() == house.limits


async def test_a_request_id_starts_one_session(house: Any) -> None:
    first = await house.begin(request_id="r")
    again = await house.begin(request_id="r")
    assert again == first
    assert (first.request_id, (await house.begin()).request_id) == ("r", None)
    with pytest.raises(Conflict, match="r"):
        await house.begin("other", request_id="r")
    assert (await house.training.counts()).running_sessions == 2


async def test_a_key_has_one_running_session(house: Any) -> None:
    first = await house.begin(key_hash="k")
    with pytest.raises(Conflict, match="already has the running session"):
        await house.begin(key_hash="k")
    assert (await house.sessions.live("k")) == first
    await house.sessions.end(first.id, "refreshed")
    second = await house.begin(key_hash="k")
    assert (await house.sessions.live("k")) == second
    ended = await house.sessions.end(second.id, "ended")
    assert await house.sessions.live("k") == ended
    assert await house.sessions.live("unknown") is None


async def test_T111_ids_are_data(house: Any, tmp_path: Path) -> None:
    for good in ("../../x", "a/b", "...", "\N{ROBOT FACE}", "x" * 512, " ", "'; DROP TABLE sessions; --"):
        assert (await house.play(good)).id == good
        await house.training.drop([group.id for group in await house.training.ready()], "test")
    for bad in ("", "x" * 513, "x" * 5000, "a\0b", "\ud800"):
        with pytest.raises(BadRequest, match="task_id"):
            await house.begin(bad)
    assert {path.name.split("-")[0] for path in tmp_path.iterdir()} <= {"store.sqlite"}


async def test_tags_and_worker_are_kept(house: Any) -> None:
    session = await house.begin(tags={"user": "ada", "split": "α"}, worker="w7")
    assert (await house.sessions.get(session.id)) == session
    assert (dict(session.tags), session.worker) == ({"user": "ada", "split": "α"}, "w7")
    assert await house.sessions.get("unknown") is None


# -- groups and capacity ---------------------------------------------------------------------------


async def test_sessions_of_an_open_group_always_pass(house: Any) -> None:
    """Lag 0 with 4 groups of 8: every group can be filled although all slots are taken (settled 2)."""
    await house.training.set_limits(replace(house.limits, n_samples=8))
    for task in "abcd":
        await house.begin(task)
    with pytest.raises(NoCapacity):
        await house.begin("e")
    started = [await house.begin(task) for task in "abcd" * 7]
    assert (await house.training.counts()).running_sessions == 32
    assert {session.sample for session in started} == set(range(1, 8))
    with pytest.raises(NoCapacity):
        await house.begin("a")  # a's group is full: the ninth would open another one


async def test_a_repeated_task_id_makes_consecutive_chunks(house: Any) -> None:
    await house.training.set_limits(replace(house.limits, n_samples=2))
    for _ in range(5):
        await house.play("a")
    assert await house.ready() == [("a", ["a", "a-1"]), ("a", ["a-2", "a-3"])]
    assert (await house.training.counts()).running == 1


async def test_T049_slots_never_leak_over_100_rounds(house: Any) -> None:
    for round_ in range(100):
        running = [await house.begin(f"t{round_}-{number}") for number in range(4)]
        with pytest.raises(NoCapacity) as refusal:
            await house.begin("one too many")
        assert (refusal.value.status, refusal.value.retry_after_s) == (429, 2)
        await house.sessions.add(house.interaction(running[0].id))
        await house.sessions.end(running[0].id, "ended")
        house.clock.now += 10
        await house.sessions.end(running[1].id, "reward_failed")
        await house.sessions.touch(running[2].id)
        assert [one.id for one in await house.sessions.expire(house.clock.now)] == [running[3].id]
        await house.begin(f"t{round_}-again", key_hash=f"again-{round_}")
        for session in (running[2].id, f"t{round_}-again"):
            await house.sessions.end(session, "ended")
        done = [group.id for group in await house.training.ready()]
        assert len(done) == 1
        await house.training.advance(Version(round_, round_, "a"), done)
    counts = await house.training.counts()
    assert (counts.running, counts.accepted, counts.free_slots, counts.consumed) == (0, 0, 4, 100)
    assert counts.dropped == {"empty": 300, "reward_failed": 100}


async def test_T059_a_recovered_run_has_the_room_of_a_fresh_one(house: Any) -> None:
    limits = Limits(max_concurrent=100, max_lag=2, batch_groups=8)
    await house.training.set_limits(limits)
    await house.training.advance(Version(10, 10, "first life"), [])
    assert (await house.training.counts()).free_slots == 24
    for number in range(24):
        await house.begin(f"t{number}")
    with pytest.raises(NoCapacity, match="24 of 24"):
        await house.begin("t24")


async def test_T060_a_dropped_group_opens_its_slot(house: Any) -> None:
    for number in range(4):
        await house.play(f"t{number}")
    with pytest.raises(NoCapacity):
        await house.begin("t4")
    dull = [group.id for group in await house.training.ready()][:3]
    await house.training.drop(dull, "zero_variance")
    await house.training.drop(dull, "again")  # changes nothing
    for number in range(4, 7):
        await house.play(f"t{number}")
    counts = await house.training.counts()
    assert (counts.accepted, dict(counts.dropped)) == (4, {"zero_variance": 3})
    assert len(await house.ready()) == 4


async def test_T061_a_slow_task_keeps_its_place(house: Any) -> None:
    await house.training.set_limits(replace(house.limits, max_lag=2))
    slow = await house.begin("slow")
    await house.sessions.add(house.interaction(slow.id))
    for number in range(3):
        await house.play(f"fast{number}")
    await house.sessions.end(slow.id, "ended")
    assert (await house.ready())[0][0] == "slow"


async def test_T062_what_is_not_taken_stays(house: Any) -> None:
    await house.training.set_limits(replace(house.limits, max_concurrent=20, max_lag=2))
    for number in range(10):
        await house.play(f"g{number}")
    taken = []
    for step in range(3):
        batch = (await house.training.ready())[:4]
        taken += [group.task_id for group in batch]
        await house.training.advance(Version(step, step, "a"), [group.id for group in batch])
    assert taken == [f"g{number}" for number in range(10)]
    assert await house.training.ready() == ()


async def test_T064_survivors_train_and_a_lone_one_does_not(house: Any) -> None:
    await house.training.set_limits(replace(house.limits, n_samples=4))
    for ending, turns in (("ended", 1), ("reward_failed", 1), ("ended", 0), ("ended", 1)):
        await house.play("two left", ending, turns=turns)
    for ending in ("ended", "reward_failed", "expired", "reward_failed"):
        await house.play("one left", ending, reward=1.0 if ending == "ended" else None)
    for _ in range(4):
        await house.play("none left", "reward_failed")
    assert await house.ready() == [("two left", ["two left", "two left-3"])]
    counts = await house.training.counts()
    assert dict(counts.dropped) == {"too_few_survivors": 1, "reward_failed": 1}
    assert (counts.running, counts.free_slots) == (0, 3)
    assert await house.store.reading.dropped_sessions() == {"reward_failed": 7, "empty": 1, "expired": 1}


async def test_a_group_that_is_not_filled_in_time_goes_on_or_is_dropped(house: Any) -> None:
    await house.training.set_limits(replace(house.limits, n_samples=4, group_timeout_s=60))
    for task in ("two", "two", "one"):
        await house.play(task)
    house.clock.now += 59
    assert await house.ready() == []
    house.clock.now += 1
    assert await house.ready() == [("two", ["two", "two-1"])]
    assert dict((await house.training.counts()).dropped) == {"too_few_survivors": 1}
    assert (await house.begin("two")).sample == 0  # a new group


async def test_the_tries_of_a_task_are_counted_over_its_groups_but_not_over_dropped_ones(house: Any) -> None:
    await house.training.set_limits(replace(house.limits, n_samples=2, group_timeout_s=60))
    played = [await house.play(task) for task in ("t", "t", "other", "t")]
    assert {one.id: (one.sample, one.attempt) for one in played} == {
        "t": (0, 0),
        "t-1": (1, 1),
        "t-2": (0, 2),
        "other": (0, 0),
    }
    house.clock.now += 60  # t-2 stays alone: its group is dropped
    again = await house.begin("t")
    assert (again.id, again.sample, again.attempt) == ("t-3", 0, 2)


async def test_an_overdue_group_waits_only_if_it_must(house: Any) -> None:
    await house.training.set_limits(replace(house.limits, n_samples=3, group_timeout_s=60))
    await house.play("enough")
    await house.play("enough")
    late = await house.begin("enough")
    await house.sessions.add(house.interaction(late.id))
    await house.play("needs it")
    needed = await house.begin("needs it")
    await house.sessions.add(house.interaction(needed.id))
    house.clock.now += 100
    assert await house.ready() == [("enough", ["enough", "enough-1"])]
    await house.sessions.end(late.id, "ended")
    await house.sessions.end(needed.id, "ended")
    assert await house.ready() == [("enough", ["enough", "enough-1"]), ("needs it", ["needs it", "needs it-1"])]
    assert await house.store.reading.dropped_sessions() == {"late": 1}


async def occupancy(house: Any) -> tuple[int, int]:
    running, accepted = await house.training.occupancy()
    return len(running), accepted


async def test_places_of_interrupted_sessions_are_filled_again_under_their_attempts(house: Any) -> None:
    await house.training.set_limits(replace(house.limits, n_samples=3, group_timeout_s=60))
    for _ in range(3):
        await house.play("t")  # attempts 0 to 2, a group that is complete
    await house.play("t")
    cut = [await house.begin("t"), await house.begin("t")]
    await house.sessions.add(house.interaction(cut[0].id))
    alone = await house.begin("alone")
    assert await occupancy(house) == (2, 1)
    house.clock.now += 59
    for _ in range(2):  # the run says so when it stops, and again when it is taken up
        assert await house.training.interrupt() == {"t": Given(2, 2), "alone": Given(1, 3)}
    house.clock.now += 59  # the groups' time began anew
    assert await occupancy(house) == (2, 1)
    assert await house.store.reading.dropped_sessions() == {"interrupted": 3}
    with pytest.raises(InvalidKey):
        await house.sessions.add(house.interaction(cut[1].id))
    assert (await house.sessions.end(cut[0].id, "ended")).ending == "expired"
    again = [await house.begin("t") for _ in range(2)]
    assert (
        [(one.sample, one.attempt) for one in again] == [(one.sample, one.attempt) for one in cut] == [(1, 4), (2, 5)]
    )
    assert again[0].group_id == cut[0].group_id
    for one in again:
        await house.sessions.add(house.interaction(one.id))
        await house.sessions.end(one.id, "ended")
    assert [(task, len(sessions)) for task, sessions in await house.ready()] == [("t", 3), ("t", 3)]
    assert ((await house.begin("t")).attempt, (await house.begin("alone")).attempt) == (6, alone.attempt)
    assert (await house.training.counts()).dropped == {}
    assert await house.training.interrupt() == {"t": Given(3, 3), "alone": Given(1, 3)}


async def test_groups_that_nobody_fills_any_more_are_closed_and_give_their_slots_back(house: Any) -> None:
    await house.training.set_limits(replace(house.limits, n_samples=3))
    for _ in range(2):
        await house.play("enough")
    await house.play("too few")
    for _ in range(3):
        await house.play("full")
    await house.begin("goes on")
    assert await occupancy(house) == (3, 1)
    await house.training.interrupt(lambda task_id: task_id == "goes on")
    assert [task for task, _ in await house.ready()] == ["enough", "full"]
    assert (await house.training.counts()).dropped == {"too_few_survivors": 1}
    assert await occupancy(house) == (1, 2)
    again = await house.begin("enough")
    assert (await house.sessions.get(again.id)).sample == 0, "a closed group takes no new session"


async def test_begin_settles_overdue_groups_itself(house: Any) -> None:
    await house.training.set_limits(replace(house.limits, n_samples=2, group_timeout_s=60))
    for task in "abcd":
        await house.play(task)
    with pytest.raises(NoCapacity):
        await house.begin("e")
    house.clock.now += 60
    assert (await house.begin("e")).sample == 0


async def test_a_full_queue_stops_new_groups(house: Any) -> None:
    await house.training.set_limits(replace(house.limits, queue_size=2))
    await house.play("a")
    await house.begin("b")
    with pytest.raises(NoCapacity, match="2 of 2"):
        await house.begin("c")


async def test_the_groups_that_run_are_listed_as_they_opened(house: Any) -> None:
    await house.training.set_limits(replace(house.limits, n_samples=2))
    half_open = await house.begin("b")
    await house.play("a")
    await house.play("a")
    live = await house.begin("c")
    running, accepted = await house.training.occupancy()
    assert [(one.id, one.task_id) for one in running] == [(half_open.group_id, "b"), (live.group_id, "c")]
    assert accepted == 1


async def test_evaluation_takes_no_slot_and_is_never_trained(house: Any) -> None:
    for number in range(4):
        await house.begin(f"t{number}")
    session = await house.begin("held out", purpose="eval")
    await house.sessions.add(house.interaction(session.id))
    await house.sessions.reward(session.id, 1.0, None)
    await house.sessions.end(session.id, "ended")
    counts = await house.training.counts()
    assert (await house.ready(), counts.running, counts.recorded_tokens) == ([], 4, 0)
    assert session.group_id == ""
    assert [one.reward for one in await house.sessions.interactions(session.id)] == [1.0]


# -- registry, opening and concurrency -------------------------------------------------------------


async def test_the_registry_knows_live_workers(house: Any) -> None:
    worker = WorkerInfo("w0", "http://127.0.0.1:1", 11, "here", 0.0)
    await house.store.registry.heartbeat(worker)
    await house.store.registry.heartbeat(replace(worker, id="w1", url="http://127.0.0.1:2"))
    session = await house.begin(worker="w0")
    [first, second] = await house.store.registry.workers()
    assert (first.id, first.running_sessions, second.running_sessions) == ("w0", 1, 0)
    assert first.heartbeat_at == house.clock.now
    house.clock.now += 8
    await house.store.registry.heartbeat(replace(worker, url="http://127.0.0.1:3", pid=12))
    house.clock.now += 8
    assert [(one.id, one.url, one.pid) for one in await house.store.registry.workers()] == [
        ("w0", "http://127.0.0.1:3", 12)
    ]
    await house.store.registry.leave("w0")
    assert await house.store.registry.workers() == ()
    assert (await house.sessions.get(session.id)) is not None


async def test_concurrent_callers_do_not_disturb_each_other(house: Any) -> None:
    """T041, T048: 50 calls each on two sessions, among calls that fail; one of two same-key starts wins."""
    one, two = await house.begin("one"), await house.begin("two")
    calls = [house.sessions.add(house.interaction(who.id, turn)) for turn in range(50) for who in (one, two)]
    failing = [house.sessions.add(house.interaction("unknown", turn)) for turn in range(20)]
    results = await asyncio.gather(*calls, *failing, return_exceptions=True)
    assert [type(result) for result in results] == [type(None)] * 100 + [NotFound] * 20
    for who in (one, two):
        assert {kept.id for kept in await house.sessions.interactions(who.id)} == {f"{who.id}/{n}" for n in range(50)}
    starts = await asyncio.gather(*(house.begin("t", key_hash="same") for _ in range(8)), return_exceptions=True)
    assert sorted(type(result).__name__ for result in starts) == ["Conflict"] * 7 + ["Session"]


async def test_a_cancelled_caller_spoils_nothing(house: Any) -> None:
    session = await house.begin()
    tasks = [asyncio.ensure_future(house.sessions.add(house.interaction(session.id, turn))) for turn in range(20)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await task
    kept = {one.index for one in await house.sessions.interactions(session.id)}
    assert kept >= set(range(1, 20, 2))


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("mysql://x/y", "known: sqlite"),
        ("store.sqlite", "known: sqlite"),
        ("postgres://u:geheim@host/db?schema=Not+plain", "not a plain name"),
        ("postgresql://u:geheim@host:port:port/db?nonsense=1", "no Postgres URL"),
        ("sqlite:///", "names no file"),
        ("sqlite://host/x", "names no file"),
        ("sqlite:///:memory:", "names no file"),
    ],
)
async def test_a_url_that_is_no_store_is_refused(url: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as refusal:
        await open_store(url)
    assert "geheim" not in str(refusal.value)
