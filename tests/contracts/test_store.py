"""What every store promises, run over the whole table of stores. The clock is the test's own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from areal.base.errors import (
    BadRequest,
    ConfigError,
    Conflict,
    InvalidKey,
    NoCapacity,
    NotFound,
    ShapeError,
    Unavailable,
)
from areal.base.types import (
    Completion,
    Ending,
    Interaction,
    Limits,
    Message,
    SamplingParams,
    Session,
    SessionRequest,
    Tool,
    ToolCall,
    Version,
    WorkerInfo,
)
from areal.store import open_store, store_url
from areal.store.base import Store

LIMITS = Limits(max_concurrent=4, max_lag=0, batch_groups=4)


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


class House:
    """A store and the few moves most tests make."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self.store, self.clock, self.keys = store, clock, 0
        self.sessions, self.training = store.sessions, store.training

    def request(self, task: str = "task", **more: object) -> SessionRequest:
        self.keys += 1
        return replace(SessionRequest(task, f"key-{self.keys}", "w0"), **more)  # type: ignore[arg-type]

    async def begin(self, task: str = "task", **more: object) -> Session:
        return await self.sessions.begin(self.request(task, **more))

    async def play(self, task: str, ending: Ending = "ended", reward: float | None = 1.0, turns: int = 1) -> Session:
        session = await self.begin(task)
        for turn in range(turns):
            await self.sessions.add(interaction(session.id, turn))
        if reward is not None and turns:
            await self.sessions.reward(session.id, reward, None)
        return await self.sessions.end(session.id, ending)

    async def ready(self) -> list[tuple[str, list[str]]]:
        return [(group.task_id, [one.id for one in group.sessions]) for group in await self.training.ready()]


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


@pytest.fixture(params=["sqlite"])
async def house(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[House]:
    clock = Clock()
    urls = {"sqlite": store_url(tmp_path / "store.sqlite")}
    async with await open_store(urls[request.param], clock=clock) as store:
        await store.training.set_limits(LIMITS)
        yield House(store, clock)


# -- begin -----------------------------------------------------------------------------------------


async def test_a_taken_task_id_gets_the_next_free_suffix(house: House) -> None:
    await house.training.set_limits(replace(LIMITS, max_lag=1))
    ids = [(await house.play(task)).id for task in ("a", "a", "a-2", "a", "a-2")]
    assert ids == ["a", "a-1", "a-2", "a-3", "a-2-1"]
    assert [session for _, [session] in await house.ready()] == ids


async def test_before_limits_and_while_draining_no_session_starts(tmp_path: Path) -> None:
    async with await open_store(store_url(tmp_path / "new.sqlite")) as store:
        house = House(store, Clock())
        with pytest.raises(Unavailable, match="still starting"):
            await house.begin()
        await store.training.set_limits(replace(LIMITS, n_samples=2))
        started = await house.begin(request_id="r1")
        await store.training.set_limits(replace(LIMITS, n_samples=2, accepting=False))
        for purpose in ("train", "eval"):
            with pytest.raises(Unavailable, match="draining"):
                await house.begin(purpose=purpose)
        assert (await house.begin(request_id="r1")).id == started.id  # an answer that was lost is given again
        assert (await store.sessions.end(started.id, "ended")).ending == "ended"


async def test_limits_under_which_nothing_can_start_are_refused(house: House) -> None:
    for bad in ({"max_concurrent": 0}, {"max_lag": -1}, {"batch_groups": 0}, {"n_samples": 0}, {"group_timeout_s": 0}):
        with pytest.raises(ConfigError, match="must be"):
            await house.training.set_limits(replace(LIMITS, **bad))
    assert await house.training.limits() == LIMITS


async def test_a_request_id_starts_one_session(house: House) -> None:
    first = await house.begin(request_id="r")
    again = await house.begin(request_id="r")
    assert again == first
    with pytest.raises(Conflict, match="r"):
        await house.begin("other", request_id="r")
    assert (await house.training.counts()).running_sessions == 1


async def test_a_key_has_one_running_session(house: House) -> None:
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


async def test_T111_ids_are_data(house: House, tmp_path: Path) -> None:
    for good in ("../../x", "a/b", "...", "\N{ROBOT FACE}", "x" * 512, " ", "'; DROP TABLE sessions; --"):
        assert (await house.play(good)).id == good
        await house.training.drop([group.id for group in await house.training.ready()], "test")
    for bad in ("", "x" * 513, "x" * 5000, "a\0b", "\ud800"):
        with pytest.raises(BadRequest, match="task_id"):
            await house.begin(bad)
    assert {path.name.split("-")[0] for path in tmp_path.iterdir()} == {"store.sqlite"}


async def test_tags_and_worker_are_kept(house: House) -> None:
    session = await house.begin(tags={"user": "ada", "split": "α"}, worker="w7")
    assert (await house.sessions.get(session.id)) == session
    assert (dict(session.tags), session.worker) == ({"user": "ada", "split": "α"}, "w7")
    assert await house.sessions.get("unknown") is None


# -- groups and capacity ---------------------------------------------------------------------------


async def test_sessions_of_an_open_group_always_pass(house: House) -> None:
    """Lag 0 with 4 groups of 8: every group can be filled although all slots are taken (settled 2)."""
    await house.training.set_limits(replace(LIMITS, n_samples=8))
    for task in "abcd":
        await house.begin(task)
    with pytest.raises(NoCapacity):
        await house.begin("e")
    started = [await house.begin(task) for task in "abcd" * 7]
    assert (await house.training.counts()).running_sessions == 32
    assert {session.sample for session in started} == set(range(1, 8))
    with pytest.raises(NoCapacity):
        await house.begin("a")  # a's group is full: the ninth would open another one


async def test_a_repeated_task_id_makes_consecutive_chunks(house: House) -> None:
    await house.training.set_limits(replace(LIMITS, n_samples=2))
    for _ in range(5):
        await house.play("a")
    assert await house.ready() == [("a", ["a", "a-1"]), ("a", ["a-2", "a-3"])]
    assert (await house.training.counts()).running == 1


async def test_T049_slots_never_leak_over_100_rounds(house: House) -> None:
    for round_ in range(100):
        running = [await house.begin(f"t{round_}-{number}") for number in range(4)]
        with pytest.raises(NoCapacity) as refusal:
            await house.begin("one too many")
        assert (refusal.value.status, refusal.value.retry_after_s) == (429, 2)
        await house.sessions.add(interaction(running[0].id))
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


async def test_T059_a_recovered_run_has_the_room_of_a_fresh_one(house: House) -> None:
    limits = Limits(max_concurrent=100, max_lag=2, batch_groups=8)
    await house.training.set_limits(limits)
    await house.training.advance(Version(10, 10, "first life"), [])
    assert (await house.training.counts()).free_slots == 24
    for number in range(24):
        await house.begin(f"t{number}")
    with pytest.raises(NoCapacity, match="24 of 24"):
        await house.begin("t24")


async def test_T060_a_dropped_group_opens_its_slot(house: House) -> None:
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


async def test_T061_a_slow_task_keeps_its_place(house: House) -> None:
    await house.training.set_limits(replace(LIMITS, max_lag=2))
    slow = await house.begin("slow")
    await house.sessions.add(interaction(slow.id))
    for number in range(3):
        await house.play(f"fast{number}")
    await house.sessions.end(slow.id, "ended")
    assert (await house.ready())[0][0] == "slow"


async def test_T062_what_is_not_taken_stays(house: House) -> None:
    await house.training.set_limits(replace(LIMITS, max_concurrent=20, max_lag=2))
    for number in range(10):
        await house.play(f"g{number}")
    taken = []
    for step in range(3):
        batch = (await house.training.ready())[:4]
        taken += [group.task_id for group in batch]
        await house.training.advance(Version(step, step, "a"), [group.id for group in batch])
    assert taken == [f"g{number}" for number in range(10)]
    assert await house.training.ready() == ()


async def test_T064_survivors_train_and_a_lone_one_does_not(house: House) -> None:
    await house.training.set_limits(replace(LIMITS, n_samples=4))
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


async def test_a_group_that_is_not_filled_in_time_goes_on_or_is_dropped(house: House) -> None:
    await house.training.set_limits(replace(LIMITS, n_samples=4, group_timeout_s=60))
    for task in ("two", "two", "one"):
        await house.play(task)
    house.clock.now += 59
    assert await house.ready() == []
    house.clock.now += 1
    assert await house.ready() == [("two", ["two", "two-1"])]
    assert dict((await house.training.counts()).dropped) == {"too_few_survivors": 1}
    assert (await house.begin("two")).sample == 0  # a new group


async def test_an_overdue_group_waits_only_if_it_must(house: House) -> None:
    await house.training.set_limits(replace(LIMITS, n_samples=3, group_timeout_s=60))
    await house.play("enough")
    await house.play("enough")
    late = await house.begin("enough")
    await house.sessions.add(interaction(late.id))
    await house.play("needs it")
    needed = await house.begin("needs it")
    await house.sessions.add(interaction(needed.id))
    house.clock.now += 100
    assert await house.ready() == [("enough", ["enough", "enough-1"])]
    await house.sessions.end(late.id, "ended")
    await house.sessions.end(needed.id, "ended")
    assert await house.ready() == [("enough", ["enough", "enough-1"]), ("needs it", ["needs it", "needs it-1"])]
    assert await house.store.reading.dropped_sessions() == {"late": 1}


async def test_begin_settles_overdue_groups_itself(house: House) -> None:
    await house.training.set_limits(replace(LIMITS, n_samples=2, group_timeout_s=60))
    for task in "abcd":
        await house.play(task)
    with pytest.raises(NoCapacity):
        await house.begin("e")
    house.clock.now += 60
    assert (await house.begin("e")).sample == 0


async def test_a_full_queue_stops_new_groups(house: House) -> None:
    await house.training.set_limits(replace(LIMITS, queue_size=2))
    await house.play("a")
    await house.begin("b")
    with pytest.raises(NoCapacity, match="2 of 2"):
        await house.begin("c")


async def test_evaluation_takes_no_slot_and_is_never_trained(house: House) -> None:
    for number in range(4):
        await house.begin(f"t{number}")
    session = await house.begin("held out", purpose="eval")
    await house.sessions.add(interaction(session.id))
    await house.sessions.reward(session.id, 1.0, None)
    await house.sessions.end(session.id, "ended")
    counts = await house.training.counts()
    assert (await house.ready(), counts.running, counts.recorded_tokens) == ([], 4, 0)
    assert session.group_id == ""
    assert [one.reward for one in await house.sessions.interactions(session.id)] == [1.0]


# -- what is recorded ------------------------------------------------------------------------------


async def test_an_interaction_comes_back_as_it_was(house: House) -> None:
    session = await house.begin()
    given = replace(
        interaction(session.id, 0, name="chatcmpl-1"),
        messages=(Message("system", "é\0\n"), Message("assistant", "", "why", (ToolCall("c", "f", '{"a": 1}'),))),
        tools=(Tool("f", "does", {"type": "object", "properties": {"a": {"enum": [1, None, "x"]}}}),),
        sampling=SamplingParams(max_tokens=5, top_p=0.9, stop=("\n",), stop_token_ids=(2,)),
        token_parent="p",
        branch_reason="edited history",
        tags=("side_request",),
        reward=-0.25,
    )
    given = replace(given, completion=replace(given.completion, constrained=np.array([True, False, True])))
    await house.sessions.add(given)
    [kept] = await house.sessions.interactions(session.id)
    assert_same(kept, given)


def assert_same(kept: Interaction, given: Interaction) -> None:
    for name in ("token_ids", "logprobs", "versions", "kept_mass", "constrained"):
        mine, theirs = getattr(kept.completion, name), getattr(given.completion, name)
        if theirs is None:
            assert mine is None
        else:
            assert mine.dtype == theirs.dtype
            assert mine.tobytes() == theirs.tobytes()
    assert kept.prompt_ids.tobytes() == given.prompt_ids.tobytes()
    plain = replace(given, completion=kept.completion, prompt_ids=kept.prompt_ids)
    assert kept == plain
    assert (kept.completion.temperature, kept.completion.finish_reason) == (0.7, "stop")


async def test_adding_the_same_id_again_changes_nothing(house: House) -> None:
    session, other = await house.begin("a"), await house.begin("b")
    first = interaction(session.id, 0, name="x")
    await house.sessions.add(first)
    await house.sessions.reward(session.id, 1.0, "x")
    await house.sessions.add(replace(first, reply=Message("assistant", "5")))
    with pytest.raises(Conflict, match="belongs to session 'a'"):
        await house.sessions.add(replace(first, session_id=other.id))
    [kept] = await house.sessions.interactions(session.id)
    assert (kept.reply.content, kept.reward) == ("4", 1.0)
    await house.sessions.end(session.id, "ended")
    await house.sessions.add(first)
    with pytest.raises(InvalidKey, match="has ended"):
        await house.sessions.add(replace(first, id="y"))
    with pytest.raises(NotFound):
        await house.sessions.add(replace(first, id="y", session_id="unknown"))


async def test_T040_a_null_reward_means_the_last_finished_that_counts(house: House) -> None:
    session = await house.begin()
    with pytest.raises(BadRequest, match="no finished interaction"):
        await house.sessions.reward(session.id, 1.0, None)
    for turn, tags in enumerate([(), ("superseded",), ("side_request",), ("aborted",)]):
        await house.sessions.add(replace(interaction(session.id, turn, name=f"i{turn}"), tags=tags))
    assert await house.sessions.reward(session.id, 1.0, None) == "i0"
    await house.sessions.add(interaction(session.id, 4, name="i4"))
    assert await house.sessions.reward(session.id, 0.5, None) == "i4"
    await house.sessions.tag("i4", "superseded")
    await house.sessions.tag("i4", "superseded")
    assert await house.sessions.reward(session.id, 0.25, None) == "i0"
    kept = await house.sessions.interactions(session.id)
    assert [one.reward for one in kept] == [0.25, None, None, None, 0.5]
    assert kept[4].tags == ("superseded",)
    with pytest.raises(NotFound):
        await house.sessions.tag("unknown", "aborted")


async def test_T042_a_session_without_a_call_is_empty_and_counted(house: House) -> None:
    for ending in ("ended", "refreshed", "expired"):
        session = await house.begin()
        with pytest.raises(BadRequest):
            await house.sessions.reward(session.id, 1.0, None)
        assert (await house.sessions.end(session.id, ending)).interaction_count == 0
    counts = await house.training.counts()
    assert (await house.ready(), dict(counts.dropped), counts.free_slots) == ([], {"empty": 3}, 4)


async def test_T043_only_finite_rewards_are_taken(house: House) -> None:
    session = await house.begin()
    await house.sessions.add(interaction(session.id))
    await house.sessions.reward(session.id, 0.5, None)
    for bad in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(BadRequest, match="finite"):
            await house.sessions.reward(session.id, bad, None)
    assert [one.reward for one in await house.sessions.interactions(session.id)] == [0.5]


async def test_T044_rewards_by_id_stay_where_they_were_set(house: House) -> None:
    session = await house.begin()
    for turn in range(3):
        await house.sessions.add(interaction(session.id, turn, name=f"i{turn}"))
    await house.sessions.reward(session.id, -0.2, "i0")
    assert await house.sessions.reward(session.id, 1.0, None) == "i2"
    assert [one.reward for one in await house.sessions.interactions(session.id)] == [-0.2, None, 1.0]
    other = await house.begin("other")
    for session_id, interaction_id in ((session.id, "unknown"), (other.id, "i0"), ("unknown", None)):
        with pytest.raises(NotFound):
            await house.sessions.reward(session_id, 1.0, interaction_id)


async def test_a_bare_id_rewards_every_choice(house: House) -> None:
    session = await house.begin()
    for name in ("x#0", "x#1", "xy#0"):
        await house.sessions.add(interaction(session.id, 0, name=name))
    await house.sessions.reward(session.id, 1.0, "x")
    await house.sessions.reward(session.id, 2.0, "x#1")
    assert {one.id: one.reward for one in await house.sessions.interactions(session.id)} == {
        "x#0": 1.0,
        "x#1": 2.0,
        "xy#0": None,
    }


# -- endings (settled 9) ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "reward", "fate"),
    [
        ("ended", 1.0, "accepted"),
        ("ended", None, "accepted"),
        ("refreshed", None, "accepted"),
        ("expired", 0.0, "accepted"),
        ("expired", None, "dropped (expired)"),
        ("reward_failed", 1.0, "dropped (reward_failed)"),
        ("excluded", 1.0, "dropped (excluded)"),
    ],
)
async def test_the_endings(house: House, ending: Ending, reward: float | None, fate: str) -> None:
    session = await house.play("task", ending, reward)
    summary = await house.store.reading.session(session.id)
    assert summary is not None
    assert (summary.fate, summary.recorded_tokens, summary.reward) == (fate, 3, reward)
    assert len(await house.ready()) == (fate == "accepted")
    counts = await house.training.counts()
    assert counts.free_slots == 4 - (fate == "accepted")
    assert counts.dropped_tokens == (0 if fate == "accepted" else 3)
    assert await house.sessions.end(session.id, "expired") == session  # it stays as it ended
    with pytest.raises(InvalidKey, match=ending):
        await house.sessions.reward(session.id, 1.0, None)
    with pytest.raises(InvalidKey):
        await house.sessions.touch(session.id)
    with pytest.raises(NotFound):
        await house.sessions.end("unknown", "ended")


async def test_T046_only_idle_sessions_expire(house: House) -> None:
    idle, active, busy, elsewhere = [
        await house.begin(name, worker="w1" if name == "elsewhere" else "w0")
        for name in ("idle", "active", "busy", "elsewhere")
    ]
    house.clock.now += 5
    await house.sessions.add(interaction(active.id))
    house.clock.now += 3
    expired = await house.sessions.expire(house.clock.now - 4, [busy.id], "w0")
    assert [one.id for one in expired] == [idle.id]
    assert expired[0].ending == "expired"
    assert [one.id for one in await house.sessions.expire(house.clock.now - 4, [])] == [busy.id, elsewhere.id]
    assert (await house.training.counts()).running == 1


async def test_a_session_can_be_excluded_until_it_is_trained(house: House) -> None:
    await house.training.set_limits(replace(LIMITS, n_samples=2))
    for _ in range(4):
        await house.play("a")
    assert len(await house.training.ready()) == 2
    await house.sessions.exclude("a-1")
    assert await house.ready() == [("a", ["a-2", "a-3"])]
    await house.training.advance(Version(1, 1, "x"), [(await house.training.ready())[0].id])
    with pytest.raises(Conflict, match="trained at step 1"):
        await house.sessions.exclude("a-2")
    running = await house.begin("b")
    assert (await house.sessions.exclude(running.id)).ending == "excluded"


# -- training --------------------------------------------------------------------------------------


async def test_version_labels_are_never_reused(house: House) -> None:
    assert await house.training.current_version() is None
    await house.play("a")
    [group] = await house.training.ready()
    await house.training.advance(Version(3, 3, "one"), [group.id])
    await house.training.advance(Version(3, 3, "one"), [group.id])  # the answer was lost, the controller asks again
    for reused in (Version(3, 4, "one"), Version(3, 3, "two"), Version(2, 2, "one")):
        with pytest.raises(Conflict, match="label"):
            await house.training.advance(reused, [])
    await house.training.advance(Version(4, 3, "two"), [])
    assert await house.training.current_version() == Version(4, 3, "two")
    assert await house.training.version(3) == Version(3, 3, "one")
    assert await house.training.version(9) is None


async def test_a_step_is_published_whole_or_not_at_all(house: House) -> None:
    await house.play("a")
    await house.begin("b")
    [accepted] = await house.training.ready()
    running = (await house.sessions.get("b")).group_id  # type: ignore[union-attr]
    for wrong, error in ((running, Conflict), ("g99", NotFound), ("nonsense", NotFound), ("g1\n", NotFound)):
        with pytest.raises(error):
            await house.training.advance(Version(1, 1, "x"), [accepted.id, wrong])
        assert await house.training.current_version() is None
        assert await house.ready() == [("a", ["a"])]
    await house.training.advance(Version(1, 1, "x"), [accepted.id])
    with pytest.raises(Conflict, match="consumed by step 1"):
        await house.training.advance(Version(2, 2, "x"), [accepted.id])
    with pytest.raises(Conflict, match="consumed by step 1"):
        await house.training.drop([accepted.id], "late thought")


async def test_recovery_frees_what_later_steps_consumed(house: House) -> None:
    for step in range(1, 4):
        session = await house.play(f"t{step}")
        [group] = await house.training.ready()
        await house.training.account(session.id, 3, {})
        await house.training.advance(Version(step, step, "one"), [group.id])
    assert (await house.training.counts()).trained_tokens == 9
    assert await house.training.release_after(1, "two") == 2
    counts = await house.training.counts()
    assert (counts.accepted, counts.consumed, counts.trained_tokens, counts.free_slots) == (2, 1, 3, 2)
    first, second = await house.training.ready()
    await house.training.advance(Version(4, 2, "two"), [first.id])
    assert await house.training.release_after(1, "two") == 0  # its own steps stand
    assert [group.id for group in await house.training.ready()] == [second.id]


async def test_every_token_is_accounted_for(house: House) -> None:
    await house.training.set_limits(replace(LIMITS, max_concurrent=9, max_lag=2))
    await house.play("trained", turns=3)
    await house.play("stale", turns=2)
    await house.play("failed", "reward_failed")
    await house.begin("empty")
    running = await house.begin("running")
    await house.sessions.add(interaction(running.id, tokens=5))
    trained, stale = await house.training.ready()
    for wrong in ((9, {"stale": 1}), (8, {}), (10, {"stale": -1})):
        with pytest.raises(ShapeError, match="recorded 9 tokens"):
            await house.training.account("trained", *wrong)
    with pytest.raises(NotFound):
        await house.training.account("unknown", 0, {})
    await house.training.account("trained", 9, {})
    await house.training.account("trained", 4, {"superseded": 3, "greedy": 2})
    await house.training.drop([stale.id], "stale")
    before = await house.training.counts()
    assert (before.trained_tokens, before.masked_tokens, before.dropped_tokens) == (0, 0, 9)
    await house.training.advance(Version(1, 1, "x"), [trained.id])
    counts = await house.training.counts()
    assert (counts.recorded_tokens, counts.trained_tokens, counts.masked_tokens, counts.dropped_tokens) == (23, 4, 5, 9)
    assert await house.store.reading.masked_tokens() == {"superseded": 3, "greedy": 2}
    fates = {one.session.id: one.fate for one in await house.store.reading.recent()}
    assert fates == {
        "running": "running",
        "empty": "running",
        "failed": "dropped (reward_failed)",
        "stale": "dropped (stale)",
        "trained": "trained at step 1",
    }
    assert [one.session.id for one in await house.store.reading.recent(1, running=False)] == ["failed"]
    assert [one.label for one in await house.store.reading.versions()] == [1]


# -- registry, opening and concurrency -------------------------------------------------------------


async def test_the_registry_knows_live_workers(house: House) -> None:
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


async def test_concurrent_callers_do_not_disturb_each_other(house: House) -> None:
    """T041, T048: 50 calls each on two sessions, among calls that fail; one of two same-key starts wins."""
    one, two = await house.begin("one"), await house.begin("two")
    calls = [house.sessions.add(interaction(who.id, turn)) for turn in range(50) for who in (one, two)]
    failing = [house.sessions.add(interaction("unknown", turn)) for turn in range(20)]
    results = await asyncio.gather(*calls, *failing, return_exceptions=True)
    assert [type(result) for result in results] == [type(None)] * 100 + [NotFound] * 20
    for who in (one, two):
        assert {kept.id for kept in await house.sessions.interactions(who.id)} == {f"{who.id}/{n}" for n in range(50)}
    starts = await asyncio.gather(*(house.begin("t", key_hash="same") for _ in range(8)), return_exceptions=True)
    assert sorted(type(result).__name__ for result in starts) == ["Conflict"] * 7 + ["Session"]


async def test_a_cancelled_caller_spoils_nothing(house: House) -> None:
    session = await house.begin()
    tasks = [asyncio.ensure_future(house.sessions.add(interaction(session.id, turn))) for turn in range(20)]
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
        ("postgres://host/db", "several hosts"),
        ("postgresql://host/db", "several hosts"),
        ("sqlite:///", "names no file"),
        ("sqlite://host/x", "names no file"),
        ("sqlite:///:memory:", "names no file"),
    ],
)
async def test_a_url_that_is_no_store_is_refused(url: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        await open_store(url)
