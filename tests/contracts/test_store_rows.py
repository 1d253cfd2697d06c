"""What every store promises: interactions, rewards, endings, consumption, accounting. `house` is in conftest.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from areal.base.errors import (
    BadRequest,
    Conflict,
    InvalidKey,
    NotFound,
    ShapeError,
    StoreError,
)
from areal.base.types import (
    Ending,
    Fork,
    Interaction,
    Message,
    SamplingParams,
    Share,
    Tool,
    ToolCall,
    Version,
)
from areal.store.balance import Amounts
from areal.store.base import Loss

# -- what is recorded ------------------------------------------------------------------------------


async def test_an_interaction_comes_back_as_it_was(house: Any) -> None:
    session = await house.begin()
    given = replace(
        house.interaction(session.id, 0, name="chatcmpl-1"),
        messages=(Message("system", "é\0\n"), Message("assistant", "", "why", (ToolCall("c", "f", '{"a": 1}'),))),
        tools=(Tool("f", "does", {"type": "object", "properties": {"a": {"enum": [1, None, "x"]}}}),),
        sampling=SamplingParams(max_tokens=5, top_p=0.9, stop=("\n",), stop_token_ids=(2,)),
        token_parent="p",
        fork=Fork("history_changed", "message 1 (user) differs", "p", 7, "\ufffd", "a\n", ""),
        tags=("side_request",),
        reward=-0.25,
    )
    given = replace(given, completion=replace(given.completion, constrained=np.array([True, False, True])))
    await house.sessions.add(given)
    [kept] = await house.sessions.interactions(session.id)
    assert_same(kept, given)


async def test_a_long_interaction_comes_back_as_it_was(house: Any) -> None:
    """Long enough for each of its columns to be packed."""
    session = await house.begin()
    given = house.interaction(session.id, 0, name="chatcmpl-1")
    ids, floats = np.arange(3000, dtype=np.int32) % 50, np.ones(3000, np.float32)
    completion = replace(given.completion, token_ids=ids, versions=ids // 50, logprobs=-floats, kept_mass=floats)
    messages = tuple(Message("user", f"é\0\n {n}") for n in range(200))
    given = replace(given, prompt_ids=ids, completion=completion, messages=messages, tools=(Tool("f"), Tool("g")))
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


async def test_adding_the_same_id_again_changes_nothing(house: Any) -> None:
    session, other = await house.begin("a"), await house.begin("b")
    first = house.interaction(session.id, 0, name="x")
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


async def test_T040_a_null_reward_means_the_last_finished_that_counts(house: Any) -> None:
    session = await house.begin()
    with pytest.raises(BadRequest, match="no finished interaction"):
        await house.sessions.reward(session.id, 1.0, None)
    for turn, tags in enumerate([(), ("superseded",), ("side_request",), ("aborted",)]):
        await house.sessions.add(replace(house.interaction(session.id, turn, name=f"i{turn}"), tags=tags))
    assert await house.sessions.reward(session.id, 1.0, None) == "i0"
    await house.sessions.add(house.interaction(session.id, 4, name="i4"))
    assert await house.sessions.reward(session.id, 0.5, None) == "i4"
    await house.sessions.tag("i4", "superseded")
    await house.sessions.tag("i4", "superseded")
    assert await house.sessions.reward(session.id, 0.25, None) == "i0"
    kept = await house.sessions.interactions(session.id)
    assert [one.reward for one in kept] == [0.25, None, None, None, 0.5]
    assert kept[4].tags == ("superseded",)
    with pytest.raises(NotFound):
        await house.sessions.tag("unknown", "aborted")


async def test_T042_a_session_without_a_call_is_empty_and_counted(house: Any) -> None:
    for ending in ("ended", "refreshed", "expired"):
        session = await house.begin()
        with pytest.raises(BadRequest):
            await house.sessions.reward(session.id, 1.0, None)
        assert (await house.sessions.end(session.id, ending)).interaction_count == 0
    counts = await house.training.counts()
    assert (await house.ready(), dict(counts.dropped), counts.free_slots) == ([], {"empty": 3}, 4)


async def test_T043_only_finite_rewards_are_taken(house: Any) -> None:
    session = await house.begin()
    await house.sessions.add(house.interaction(session.id))
    await house.sessions.reward(session.id, 0.5, None)
    for bad in (float("nan"), float("inf"), -float("inf"), 1e308, -1.1e6):
        with pytest.raises(BadRequest, match="finite"):
            await house.sessions.reward(session.id, bad, None)
    assert [one.reward for one in await house.sessions.interactions(session.id)] == [0.5]


async def test_T044_rewards_by_id_stay_where_they_were_set(house: Any) -> None:
    session = await house.begin()
    for turn in range(3):
        await house.sessions.add(house.interaction(session.id, turn, name=f"i{turn}"))
    await house.sessions.reward(session.id, -0.2, "i0")
    assert await house.sessions.reward(session.id, 1.0, None) == "i2"
    assert [one.reward for one in await house.sessions.interactions(session.id)] == [-0.2, None, 1.0]
    other = await house.begin("other")
    for session_id, interaction_id in ((session.id, "unknown"), (other.id, "i0"), ("unknown", None)):
        with pytest.raises(NotFound):
            await house.sessions.reward(session_id, 1.0, interaction_id)


async def test_a_bare_id_rewards_every_choice(house: Any) -> None:
    session = await house.begin()
    for name in ("x#0", "x#1", "xy#0"):
        await house.sessions.add(house.interaction(session.id, 0, name=name))
    await house.sessions.reward(session.id, 1.0, "x")
    await house.sessions.reward(session.id, 2.0, "x#1")
    assert {one.id: one.reward for one in await house.sessions.interactions(session.id)} == {
        "x#0": 1.0,
        "x#1": 2.0,
        "xy#0": None,
    }


async def test_an_answer_leads_to_its_session(house: Any) -> None:
    one, two = await house.begin("one"), await house.begin("two")
    await house.sessions.add(house.interaction(one.id, 0, name="x#0"))
    await house.sessions.add(house.interaction(two.id, 0, name="xy"))
    await house.sessions.end(two.id, "ended")
    found = {name: await house.sessions.of_answer(name) for name in ("x", "x#0", "xy", "x#1", "", "y")}
    assert {name: session and session.id for name, session in found.items()} == {
        "x": "one",
        "x#0": "one",
        "xy": "two",
        "x#1": None,
        "": None,
        "y": None,
    }
    assert found["xy"].ending == "ended"


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
async def test_the_endings(house: Any, ending: Ending, reward: float | None, fate: str) -> None:
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


async def test_T046_only_idle_sessions_expire(house: Any) -> None:
    idle, active, busy, elsewhere = [
        await house.begin(name, worker="w1" if name == "elsewhere" else "w0")
        for name in ("idle", "active", "busy", "elsewhere")
    ]
    house.clock.now += 5
    await house.sessions.add(house.interaction(active.id))
    house.clock.now += 3
    expired = await house.sessions.expire(house.clock.now - 4, [busy.id], "w0")
    assert [one.id for one in expired] == [idle.id]
    assert expired[0].ending == "expired"
    assert [one.id for one in await house.sessions.expire(house.clock.now - 4, [])] == [busy.id, elsewhere.id]
    assert (await house.training.counts()).running == 1


async def test_a_session_can_be_excluded_until_it_is_trained(house: Any) -> None:
    await house.training.set_limits(replace(house.limits, n_samples=2))
    for _ in range(4):
        await house.play("a")
    assert len(await house.training.ready()) == 2
    await house.sessions.exclude("a-1")
    assert await house.ready() == [("a", ["a-2", "a-3"])]
    await house.training.advance(Version(1, 1, "x"), [(await house.training.ready())[0].id])
    with pytest.raises(Conflict, match="trained at step 1"):
        await house.sessions.exclude("a-2")
    running = await house.begin("b")
    assert (await house.sessions.exclude(running.id, "asked for")).ending == "excluded"
    assert (await house.sessions.exclude(running.id)).excluded_because == "asked for"
    with pytest.raises(NotFound):
        await house.sessions.exclude("nobody")


async def test_a_step_has_its_groups_until_it_is_published_or_lost(house: Any) -> None:
    await house.training.set_limits(replace(house.limits, n_samples=2))
    for task in ("a", "a", "b", "b"):
        await house.play(task)
    first, second = await house.training.ready()
    members = {group.id: [one.id for one in group.sessions] for group in (first, second)}
    await house.sessions.exclude("b")  # its group is dropped: two are needed
    assert not await house.training.take(Version(1, 1, "x"), members)
    assert not await house.training.take(Version(1, 1, "x"), {first.id: ["a"]})
    assert [group.id for group in await house.training.ready()] == [first.id]
    assert await house.training.take(Version(1, 1, "x"), {first.id: ["a-1", "a"]})
    assert await house.ready() == []
    assert (await house.training.counts()).accepted == 1  # it holds its slot until it is published
    with pytest.raises(Conflict, match="is being trained by step 1"):
        await house.sessions.exclude("a")
    assert (await house.store.reading.session("a")).fate == "in step 1"
    await house.training.release_after(0, "x")  # of the incarnation that holds it
    assert await house.ready() == []
    await house.training.release_after(0, "y")
    assert await house.ready() == [("a", ["a", "a-1"])]
    assert await house.training.take(Version(2, 1, "y"), {first.id: ["a-1", "a"]})
    assert await house.training.take(Version(2, 1, "y"), {})
    assert await house.ready() == [("a", ["a", "a-1"])]


async def test_deleted_content_is_gone_and_the_sums_stay(house: Any) -> None:
    await house.play("trained", turns=2)
    await house.play("waiting")
    await house.begin("running", tags={"user": "Ada"})
    await house.sessions.add(house.interaction("running"))
    trained, _ = await house.training.ready()
    assert await house.training.take(Version(1, 1, "x"), {trained.id: ["trained"]})
    before = await house.training.counts()
    for name in ("trained", "waiting", "running"):
        gone = await house.sessions.exclude(name, "the user asked", delete=True)
        assert (gone.deleted_at, gone.excluded_because, gone.tags) == (house.clock.now, "the user asked", {})
        assert await house.sessions.interactions(name) == ()
        assert await house.sessions.exclude(name, delete=True) == gone
    await house.training.account("trained", {"": Share(6, 2)})
    await house.training.advance(Version(1, 1, "x"), [trained.id])
    counts = await house.training.counts()
    assert counts.recorded_tokens == before.recorded_tokens == 12
    assert (counts.trained_tokens, counts.dropped_tokens) == (6, 6)
    assert await house.store.reading.dropped_sessions() == {"excluded": 2}
    fates = {one.session.id: one.fate for one in await house.store.reading.recent()}
    assert fates == {
        "trained": "trained at step 1, content deleted",
        "waiting": "dropped (excluded), content deleted",
        "running": "dropped (excluded), content deleted",
    }


@pytest.mark.parametrize("published", [False, True])
async def test_a_lost_step_does_not_train_again_what_was_deleted(house: Any, published: bool) -> None:
    await house.training.set_limits(replace(house.limits, n_samples=3))
    for _ in range(3):
        await house.play("a")
    await house.training.set_limits(house.limits)
    await house.play("b")
    groups = await house.training.ready()
    members = {group.id: [one.id for one in group.sessions] for group in groups}
    assert await house.training.take(Version(1, 1, "x"), members)
    if published:
        await house.training.advance(Version(1, 1, "x"), list(members))
    for name in ("a-1", "b"):
        await house.sessions.exclude(name, delete=True)
    assert await house.training.release_after(0, "y") == 2 * published
    assert await house.ready() == [("a", ["a", "a-2"])]
    assert (await house.training.counts()).dropped == {"excluded": 1}
    assert (await house.training.counts()).dropped_tokens == 6


async def test_a_step_that_hands_back_leaves_out_what_was_deleted_meanwhile(house: Any) -> None:
    await house.play("a")
    await house.play("b")
    members = {group.id: [one.id for one in group.sessions] for group in await house.training.ready()}
    assert await house.training.take(Version(1, 1, "x"), members)
    await house.sessions.exclude("a", delete=True)
    assert not await house.training.take(Version(1, 1, "x"), members)
    assert await house.ready() == [("b", ["b"])]
    assert (await house.training.counts()).dropped == {"excluded": 1}


# -- training --------------------------------------------------------------------------------------


async def test_version_labels_are_never_reused(house: Any) -> None:
    assert await house.training.version() is None
    await house.play("a")
    [group] = await house.training.ready()
    await house.training.advance(Version(3, 3, "one"), [group.id])
    await house.training.advance(Version(3, 3, "one"), [group.id])  # the answer was lost, the controller asks again
    for reused in (Version(3, 4, "one"), Version(3, 3, "two"), Version(2, 2, "one")):
        with pytest.raises(Conflict, match="label"):
            await house.training.advance(reused, [])
    await house.training.advance(Version(4, 3, "two"), [])
    assert await house.training.version() == Version(4, 3, "two")
    assert await house.training.version(3) == Version(3, 3, "one")
    assert await house.training.version(9) is None


async def test_a_label_that_is_only_taken_makes_no_step(house: Any) -> None:
    served = house.store.reading.served
    assert await served() is None
    await house.training.advance(Version(0, 0, "one"), [])  # a life begins
    await house.play("a")
    [group] = await house.training.ready()
    await house.training.advance(Version(1, 1, "one"), [])  # taken before a server can sample under it
    assert await served() == Version(0, 0, "one")
    assert await house.training.version() == Version(1, 1, "one")
    await house.training.advance(Version(1, 1, "one"), [group.id])
    await house.training.advance(Version(2, 2, "one"), [])  # and here the run is killed
    assert await served() == Version(1, 1, "one")
    await house.training.advance(Version(3, 1, "two"), [])
    assert await served() == Version(3, 1, "two")


async def test_a_step_is_published_whole_or_not_at_all(house: Any) -> None:
    await house.play("a")
    await house.begin("b")
    [accepted] = await house.training.ready()
    running = (await house.sessions.get("b")).group_id  # type: ignore[union-attr]
    for wrong, error in ((running, Conflict), ("g99", NotFound), ("nonsense", NotFound), ("g1\n", NotFound)):
        with pytest.raises(error):
            await house.training.advance(Version(1, 1, "x"), [accepted.id, wrong])
        assert await house.training.version() is None
        assert await house.ready() == [("a", ["a"])]
    await house.training.advance(Version(1, 1, "x"), [accepted.id])
    with pytest.raises(Conflict, match="consumed by step 1"):
        await house.training.advance(Version(2, 2, "x"), [accepted.id])
    with pytest.raises(Conflict, match="consumed by step 1"):
        await house.training.drop([accepted.id], "late thought")


async def test_recovery_frees_what_later_steps_consumed(house: Any) -> None:
    for step in range(1, 4):
        session = await house.play(f"t{step}")
        [group] = await house.training.ready()
        await house.training.account(session.id, {"": Share(3, 1)})
        await house.training.advance(Version(step, step, "one"), [group.id])
    assert (await house.training.counts()).trained_tokens == 9
    assert await house.training.release_after(1, "two") == 2
    counts = await house.training.counts()
    assert (counts.accepted, counts.consumed, counts.trained_tokens, counts.free_slots) == (2, 1, 3, 2)
    first, second = await house.training.ready()
    await house.training.advance(Version(4, 2, "two"), [first.id])
    assert await house.training.release_after(1, "two") == 0  # its own steps stand
    assert [group.id for group in await house.training.ready()] == [second.id]


async def test_every_token_is_accounted_for(house: Any) -> None:
    await house.training.set_limits(replace(house.limits, max_concurrent=9, max_lag=2))
    await house.play("trained", turns=3)
    await house.play("stale", turns=2)
    await house.play("failed", "reward_failed")
    await house.begin("empty")
    running = await house.begin("running")
    await house.sessions.add(house.interaction(running.id, tokens=5))
    trained, stale = await house.training.ready()
    for wrong in ([(9, 3), (1, 0)], [(8, 3)], [(10, 3), (-1, 0)], [(9, 2)], [(9, 4), (0, -1)]):
        shares = {reason: Share(*share) for reason, share in zip(("", "stale"), wrong, strict=False)}
        with pytest.raises(ShapeError, match="recorded 9 tokens in 3 interactions"):
            await house.training.account("trained", shares)
    with pytest.raises(NotFound):
        await house.training.account("unknown", {})
    await house.training.account("trained", {"": Share(9, 3)})
    shares = {"": Share(4, 2), "superseded": Share(3, 1), "greedy": Share(2, 0)}
    await house.training.account("trained", shares)
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
    assert await house.store.reading.served() == Version(1, 1, "x")


async def test_everything_recorded_has_one_fate_in_every_unit(house: Any) -> None:
    await house.training.set_limits(replace(house.limits, max_concurrent=9, max_lag=2, n_samples=2))
    for task in ("trained", "trained", "stale", "stale", "waiting", "waiting", "half"):
        await house.play(task, turns=2, reward=None if task == "half" else 1.0)
    await house.play("lost", "reward_failed")
    await house.play("lost", "expired", reward=None)
    running = await house.begin("running")
    await house.sessions.add(house.interaction(running.id, tokens=5))
    trial = await house.begin("trial", purpose="eval")
    await house.sessions.add(house.interaction(trial.id, tokens=7))
    trained, stale, _ = await house.training.ready()
    await house.training.drop([stale.id], "stale")
    assert await house.training.take(Version(1, 1, "x"), {trained.id: ["trained", "trained-1"]})
    await house.training.account("trained", {"": Share(4, 2), "constrained": Share(2, 0)})
    await house.training.account("trained-1", {"": Share(0, 0), "stale": Share(3, 1), "greedy": Share(3, 1)})
    held = await house.store.reading.balance()
    assert (held.trained, held.waiting.groups, held.faults) == (Amounts(), 2, ()), "no step has been published"
    await house.training.advance(Version(1, 1, "x"), [trained.id])
    books = await house.store.reading.balance()
    assert books.faults == ()
    assert books.recorded == books.total == Amounts(tokens=53, interactions=17, sessions=10, groups=6)
    assert books.trained == Amounts(tokens=4, interactions=2, sessions=1, groups=1)
    assert books.masked == {
        "constrained": Amounts(tokens=2),
        "greedy": Amounts(tokens=3, interactions=1),
        "stale": Amounts(tokens=3, interactions=1, sessions=1),
    }
    assert books.dropped == {
        "expired": Amounts(tokens=3, interactions=1, sessions=1),
        "reward_failed": Amounts(tokens=3, interactions=1, sessions=1),
        "stale": Amounts(tokens=12, interactions=4, sessions=2, groups=1),
        "too_few_survivors": Amounts(groups=1),
    }
    assert books.waiting == Amounts(tokens=12, interactions=4, sessions=2, groups=1)
    assert books.open == Amounts(tokens=11, interactions=3, sessions=2, groups=2)
    assert books.evaluation == Amounts(tokens=7, interactions=1, sessions=1)
    assert (books.rewarded, books.unrewarded, books.trained_by_version) == (7, 2, {1: 4})


async def test_a_step_that_does_not_account_for_a_session_is_at_fault(house: Any) -> None:
    await house.play("a", turns=2)
    [group] = await house.training.ready()
    await house.training.advance(Version(1, 1, "x"), [group.id])
    books = await house.store.reading.balance()
    assert books.recorded == Amounts(tokens=6, interactions=2, sessions=1, groups=1)
    assert books.total == Amounts(groups=1)
    assert len(books.faults) == 4
    assert books.faults[0].startswith(
        f"session 'a' of group {group.id} recorded 6 tokens in 2 interactions and was in step 1, which does not say"
    )
    assert books.faults[1].startswith("6 tokens were recorded, but trained, masked, dropped, waiting and open are 0 ")


async def test_a_step_finds_its_groups_again(house: Any) -> None:
    await house.training.set_limits(replace(house.limits, n_samples=2))
    for task, ending in (("a", "ended"), ("a", "ended"), ("b", "ended"), ("b", "ended")):
        await house.play(task, ending)
    before = await house.training.ready()
    first, second = before
    await house.training.advance(Version(1, 1, "x"), [first.id])
    await house.training.advance(Version(2, 2, "x"), [second.id])
    assert await house.store.reading.consumed(Version(1, 1, "x")) == (first,)
    assert await house.store.reading.consumed(Version(2, 2, "x")) == (second,)
    assert await house.store.reading.consumed(Version(3, 2, "y")) == ()


async def test_what_a_lost_step_said_is_forgotten(house: Any) -> None:
    await house.play("a")
    [group] = await house.training.ready()
    assert await house.training.take(Version(1, 1, "x"), {group.id: ["a"]})
    await house.training.account("a", {"": Share(3, 1)})  # then it crashed
    assert await house.training.release_after(0, "y") == 0
    await house.training.advance(Version(2, 1, "y"), [group.id])
    books = await house.store.reading.balance()
    assert "does not say what became of it" in books.faults[0]


async def test_sessions_are_walked_in_pages_in_the_order_in_which_they_began(house: Any) -> None:
    await house.training.set_limits(replace(house.limits, max_concurrent=9, max_lag=2))
    for name in ("c", "a", "b"):
        await house.play(name)
    await house.begin("a")
    pages, after = [], ""
    while page := await house.store.reading.walk(after, 3):
        pages.append([one.session.id for one in page])
        after = page[-1].session.id
    assert pages == [["c", "a", "b"], ["a-1"]]
    assert await house.store.reading.walk("a-1") == ()


async def test_what_a_step_said_of_a_group_that_is_dropped_is_forgotten(house: Any) -> None:
    await house.play("a")
    [group] = await house.training.ready()
    assert await house.training.take(Version(1, 1, "x"), {group.id: ["a"]})
    await house.training.account("a", {"": Share(3, 1)})
    assert await house.training.take(Version(1, 1, "x"), {})  # handed back
    await house.training.drop([group.id], "stale")
    books = await house.store.reading.balance()
    assert books.faults == ()
    assert (books.trained, books.dropped) == (Amounts(), {"stale": Amounts(3, 1, 1, 1)})


async def test_a_store_that_is_read_is_not_changed(house: Any, reopen: Any) -> None:
    await house.play("a", turns=2)
    async with await reopen(read_only=True) as other:
        with pytest.raises(StoreError, match="opened to be read"):
            await other.training.drop(["g1"], "no")
        await house.play("b")  # the run goes on beside it
        assert (await other.reading.balance()).recorded.sessions == 2
    await house.store.__aexit__(None, None, None)
    async with await reopen(read_only=True) as alone:
        assert (await alone.reading.balance()).recorded.sessions == 2


async def test_losses_are_told_by_task_and_reason(house: Any) -> None:
    """Whole groups, single sessions of a group that was trained, and tokens masked as stale; evaluation loses nothing."""
    await house.training.set_limits(replace(house.limits, n_samples=3))
    for task, endings in (
        ("gone", ("ended", "ended", "reward_failed")),
        ("part", ("ended", "reward_failed", "ended")),
        ("gone", ("reward_failed",) * 3),
    ):
        for ending in endings:
            await house.play(task, ending=ending, reward=None, turns=2)
    evaluated = await house.begin("held out", purpose="eval")
    await house.sessions.end(evaluated.id, "reward_failed")
    gone, part = await house.training.ready()
    assert (gone.task_id, part.task_id) == ("gone", "part")
    await house.training.drop([gone.id], "stale")
    await house.training.account(part.sessions[0].id, {"stale": Share(6, 2)})
    await house.training.account(part.sessions[1].id, {"": Share(3, 1), "greedy": Share(3, 1)})
    lost = {
        Loss("gone", "stale", 1, 3, 18),
        Loss("gone", "reward_failed", 1, 3, 18),
        Loss("part", "reward_failed", 0, 1, 6),
    }
    assert set(await house.store.reading.losses()) == lost
    await house.training.advance(Version(1, 1, "x"), [part.id])
    assert set(await house.store.reading.losses()) == lost | {Loss("part", "stale", 0, 1, 6)}
    assert len(await house.store.reading.losses(limit=1)) == 1


async def test_a_reward_goes_to_the_named_answer_alone(house: Any) -> None:
    session = await house.begin()
    for name in ("a", "b#0", "b#1", "c"):
        await house.sessions.add(house.interaction(session.id, 0, name=name))
    for unknown in ("", "#", "b#", "b#2", "%", "chatcmpl-other"):
        with pytest.raises(NotFound, match="has no interaction"):
            await house.sessions.reward(session.id, 1.0, unknown)
    assert await house.sessions.reward(session.id, 0.5, "b") == "b"
    kept = {row.id: row.reward for row in await house.sessions.interactions(session.id)}
    assert kept == {"a": None, "b#0": 0.5, "b#1": 0.5, "c": None}
