"""What is trained next: ages, surplus, survivors, accounts. On a real store."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from areal.algorithms import ALGORITHMS
from areal.base.errors import Conflict, NoCapacity, StoreError
from areal.base.types import SessionRequest, Version
from areal.engine.credit import Credit
from areal.rollout.account import settle
from areal.store.base import Loss
from tests.proxy.service import until
from tests.rollout.conftest import interaction


async def advance(gate, consumed=()) -> None:
    await gate.advance(gate.next_version(), list(consumed))


async def test_T062_a_surplus_waits_for_the_next_step_and_nothing_is_taken_twice(store, played, batching) -> None:
    gate, batcher = await batching(batch=4, max_lag=2)
    for number in range(10):
        await played.session(f"task-{number}")
    taken = []
    for _ in range(2):
        batch = await batcher.next_batch()
        taken.append([group.task_id for group in batch.groups])
        await advance(gate, batch.group_ids)
    assert taken == [[f"task-{n}" for n in range(4)], [f"task-{n}" for n in range(4, 8)]]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(batcher.next_batch(), 0.3)
    assert {group.task_id for group in await store.training.ready()} == {"task-8", "task-9"}


async def test_a_step_takes_what_is_finished_up_to_its_most_and_at_lag_0_exactly_the_fewest(
    store, played, batching
) -> None:
    gate, batcher = await batching(batch=2, most_groups=4, max_lag=2)
    taken = []
    for finished in (3, 5, 0, 2):
        for _ in range(finished):
            await played.session(f"task-{played.number}", version=gate.current.label)
        if (batch := await batcher.poll()) is not None:
            taken.append([group.task_id for group in batch.groups])
            await advance(gate, batch.group_ids)
    assert [len(tasks) for tasks in taken] == [3, 4, 3]
    assert [task for tasks in taken for task in tasks] == [f"task-{number}" for number in range(10)]
    for _ in range(5):
        await played.session(f"task-{played.number}", version=gate.current.label)
    _, sequential = await batching(batch=2, most_groups=4, max_lag=0)  # taken up again without lag, with five at once
    assert len((await sequential.next_batch()).groups) == 2


async def test_tokens_older_than_the_lag_are_never_in_a_batch(store, played, batching) -> None:
    gate, batcher = await batching(batch=1, max_lag=1)
    await played.session("old", version=0)
    for _ in range(2):
        await advance(gate)
    await played.session("new", version=2)
    batch = await batcher.next_batch()
    assert [group.task_id for group in batch.groups] == ["new"]
    assert batch.lag_max == 0
    assert (await store.training.counts()).dropped == {"stale": 1}


@pytest.mark.parametrize(("stale", "trained"), [("drop", 4), ("mask", 6)])
async def test_T065_mixed_versions_are_judged_by_the_oldest_token_that_is_trained(
    store, played, batching, stale, trained
) -> None:
    """[3, 3, 4, 4] is as old as its 3s; an old answer that is not trained (greedy) makes nobody old."""
    gate, batcher = await batching(batch=1, max_lag=1, n_samples=3, stale=stale)
    for _ in range(3):
        await advance(gate)
    samples = [await store.sessions.begin(SessionRequest("task", f"k{k}", "w0")) for k in range(3)]
    for session, mixed in zip(samples, ([3, 3, 4, 4], [4, 4], [4, 4]), strict=True):
        said = interaction(session.id, tokens=len(mixed), index=1)
        versions = np.array(mixed, np.int32)
        await store.sessions.add(replace(said, completion=replace(said.completion, versions=versions)))
    await store.sessions.add(interaction(samples[1].id, version=0, tags=("greedy",)))
    for session in samples:
        await store.sessions.end(session.id, "ended")
    for _ in range(2):
        await advance(gate)
    assert gate.current.step == 5
    batch = await batcher.next_batch()
    assert batch.lag_max == 1
    await settle(store.training, batch)
    await advance(gate, batch.group_ids)
    counts = await store.training.counts()
    assert (counts.recorded_tokens, counts.trained_tokens) == (11, trained)
    assert await store.reading.masked_tokens() == {"greedy": 3, "stale": 8 - trained}
    assert await store.reading.losses() == (Loss("task", "stale", groups=0, sessions=1, tokens=8 - trained),)


async def test_at_lag_0_nothing_is_generated_while_a_step_trains(store, played, batching) -> None:
    """`async.enabled: false` is this lag, and nothing else (tests/config): the loop alternates as a sequential one does."""
    gate, batcher = await batching(batch=2, max_lag=0)
    for task in ("a", "b"):
        await played.session(task)
    with pytest.raises(NoCapacity):
        await played.session("c")  # all of the next batch is there
    batch = await batcher.next_batch()
    with pytest.raises(NoCapacity):
        await played.session("c")  # the step trains
    await advance(gate, batch.group_ids)
    await played.session("c", version=1)


async def test_T065_tokens_of_a_version_whose_step_was_lost_keep_its_label(store, played, batching) -> None:
    """The run dies after servers have swapped to label 1 and before its step is consumed: label 1 is never another's."""
    gate, _ = await batching(batch=1, max_lag=1)
    await gate.reserve(gate.next_version())
    await played.session("sampled under 1", version=1)
    gate, batcher = await batching(batch=1, max_lag=1)
    assert (gate.current, gate.next_version().label) == (Version(2, 0, "test"), 3)
    assert (await batcher.next_batch()).lags == {1: -1}, "one step ahead of where the run goes on"


async def test_mask_leaves_out_old_tokens_and_accounts_for_them(store, played, batching) -> None:
    gate, batcher = await batching(batch=1, max_lag=1, n_samples=2, stale="mask")
    await played.session("task", version=0)
    for _ in range(2):
        await advance(gate)
    await played.session("task", version=2)
    batch = await batcher.next_batch()
    assert sum(int(row.trained.sum()) for group in batch.groups for row in group.trajectories) == 3
    await advance(gate, batch.group_ids)
    await settle(store.training, batch)
    counts = await store.training.counts()
    assert (counts.recorded_tokens, counts.trained_tokens, counts.masked_tokens) == (6, 3, 3)


async def test_a_group_goes_on_with_two_survivors_and_ends_with_one(store, played, batching) -> None:
    gate, batcher = await batching(batch=1, max_lag=0, n_samples=3)
    for version in (0, 1, 1):
        if version == 1 and gate.current.label == 0:
            await advance(gate)
        await played.session("task", version=version)
    batch = await batcher.next_batch()
    assert batch.sessions == 2
    await advance(gate, batch.group_ids)
    await settle(store.training, batch)
    counts = await store.training.counts()
    assert counts.recorded_tokens == counts.trained_tokens + counts.masked_tokens == 9
    assert counts.masked_tokens == 3


async def test_T058_a_group_with_nothing_to_train_is_dropped_and_named(store, played, batching) -> None:
    _, batcher = await batching(batch=1)
    await played.session("greedy", tags=("greedy",))
    await played.session("good")
    batch = await batcher.next_batch()
    assert [group.task_id for group in batch.groups] == ["good"]
    counts = await store.training.counts()
    assert counts.dropped == {"nothing_to_train": 1}


async def test_T060_groups_of_equals_are_replaced_and_their_slots_open(store, played, batching) -> None:
    credit = Credit(ALGORITHMS["dapo"])
    _, batcher = await batching(batch=4, max_lag=0, n_samples=2, informative=credit.informative)
    for number in range(4):  # all that lag 0 lets in: three of them say nothing
        for sample in range(2):
            await played.session(f"task-{number}", reward=1.0 if number < 3 else float(sample))
    with pytest.raises(NoCapacity):
        await played.session("more")
    assert await batcher.poll() is None
    counts = await store.training.counts()
    assert (counts.dropped, counts.accepted, counts.free_slots) == ({"zero_variance": 3}, 1, 3)
    for number in range(4, 7):
        for sample in range(2):
            await played.session(f"task-{number}", reward=float(sample))
    batch = await batcher.next_batch()
    assert [group.task_id for group in batch.groups] == ["task-3", "task-4", "task-5", "task-6"]


async def test_the_lag_of_each_label_travels_with_the_batch(store, played, batching) -> None:
    gate, batcher = await batching(batch=2, max_lag=2)
    await played.session("old", version=0)
    for _ in range(2):
        await advance(gate)
    await played.session("new", version=2)
    assert (await batcher.next_batch()).lags == {0: 2, 2: 0}


async def test_the_batch_does_not_depend_on_the_order_of_arrival(store, played, batching) -> None:
    _, batcher = await batching(batch=3)
    for task in ("c", "a", "b"):
        await played.session(task)
    assert [group.task_id for group in (await batcher.next_batch()).groups] == ["a", "b", "c"]


async def test_a_resumed_run_knows_the_age_of_tokens_of_the_life_before(store, played, batching) -> None:
    await batching()  # the first life: label 0, step 0
    await store.training.advance(Version(1, 1, "first"), [])
    await store.training.advance(Version(2, 2, "first"), [])
    gate, batcher = await batching(batch=1, max_lag=1)  # restarts at step 0 under label 3
    assert gate.current == Version(3, 0, "test")
    await played.session("ahead", version=2)
    batch = await batcher.next_batch()
    assert batch.lag_max <= 0


async def test_waiting_says_what_it_waits_for(store, played, batching, monkeypatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("areal.rollout.batcher.SAY_S", 0.0)
    _, batcher = await batching(batch=3, said=said)
    await played.session("one")
    waiting = asyncio.create_task(batcher.next_batch())
    await until(lambda: said)
    assert said[0].startswith("waiting for 2 more groups; 0 sessions running, slots ")
    assert "dropped" not in said[0]
    await played.session("greedy", tags=("greedy",))
    await until(lambda: said[-1].endswith("; groups dropped so far: nothing_to_train 1"))
    waiting.cancel()


async def test_clipped_rewards_are_counted_and_the_raw_ones_shown(played, batching) -> None:
    _, batcher = await batching(batch=3, clip=1.0)
    for task, reward in (("a", 5.0), ("b", 1.0), ("c", None)):
        await played.session(task, reward=reward)
    batch = await batcher.next_batch()
    assert (batch.rewards_clipped, batch.reward) == (1, 2.0)
    assert [row.spans[0].reward for group in batch.groups for row in group.trajectories] == [1.0, 1.0, 0.0]


async def test_a_batch_knows_whether_anybody_rewarded_it(played, batching) -> None:
    gate, batcher = await batching(batch=2)
    for task, reward in (("a", None), ("b", None), ("c", None), ("d", 0.0)):
        await played.session(task, reward=reward)
    for rewarded in (False, True):
        batch = await batcher.next_batch()
        assert (batch.rewarded, batch.reward) == (rewarded, 0.0)
        await advance(gate, batch.group_ids)


async def test_a_session_excluded_before_the_step_takes_it_is_in_no_batch(store, played, batching) -> None:
    gate, batcher = await batching(batch=2, n_samples=3)
    for task in ("a", "a", "a", "b", "b"):
        await played.session(task)
    assert await batcher.poll() is None  # the rows of the first group were read
    await store.sessions.exclude("a-1")
    await played.session("b")
    batch = await batcher.next_batch()
    assert [group.sessions() for group in batch.groups] == [("a", "a-2"), ("b", "b-1", "b-2")]
    with pytest.raises(Conflict, match="being trained"):
        await store.sessions.exclude("b")
    await advance(gate, batch.group_ids)
    await settle(store.training, batch)
    counts = await store.training.counts()
    assert (counts.trained_tokens, counts.dropped_tokens, counts.recorded_tokens) == (15, 3, 18)


async def test_a_session_excluded_while_its_batch_is_made_is_not_in_it(store, played, batching) -> None:
    _, batcher = await batching(batch=1, n_samples=3)
    for _ in range(3):
        await played.session("a")

    class Late:
        """The training store, with an exclusion that is committed just before the batch is taken."""

        def __getattr__(self, name: str) -> object:
            return getattr(store.training, name)

        async def take(self, version, sessions) -> bool:
            await store.sessions.exclude("a")
            return await store.training.take(version, sessions)

    batcher._training = Late()
    assert [group.sessions() for group in (await batcher.next_batch()).groups] == [("a-1", "a-2")]


async def test_groups_that_are_too_few_are_counted_often_and_read_seldom(store, played, batching, monkeypatch) -> None:
    monkeypatch.setattr("areal.rollout.batcher.LOOK_S", 3600.0)
    _, batcher = await batching(batch=2, max_lag=2)
    reads, counts = [], asyncio.Semaphore(0)
    ready, occupancy = store.training.ready, store.training.occupancy
    monkeypatch.setattr(store.training, "ready", lambda: reads.append(1) or ready())
    monkeypatch.setattr(store.training, "occupancy", lambda: counts.release() or occupancy())
    await played.session("first")
    waiting = asyncio.create_task(batcher.next_batch())
    for _ in range(4):
        await counts.acquire()
    assert len(reads) == 1
    await played.session("second")
    assert (await asyncio.wait_for(waiting, 60)).sessions == 2


async def test_a_store_that_shows_groups_and_never_gives_them_ends_the_run_with_a_sentence(
    store, played, batching
) -> None:
    """So it was where a process read another log than it wrote: the queue was full, and the run waited for ever."""
    _, batcher = await batching(batch=1)
    await played.session("a")

    class Torn:
        """The training store, whose writer knows of no session."""

        def __getattr__(self, name: str) -> object:
            return getattr(store.training, name)

        async def take(self, version, sessions) -> bool:
            return False

    batcher._training = Torn()
    with pytest.raises(StoreError, match=r"shows 1 finished groups \(g1, …\) and refused them to the step 20 times"):
        async with asyncio.timeout(60):
            await batcher.next_batch()
