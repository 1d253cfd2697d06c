"""Any order of begin, add, reward, end, expire, score, advance, drop and recovery against a model in plain lists.

The model knows what a session and a group are; it has no SQL, no states, no counters. After every move the store's counts are
the model's, the law holds, and every token is somewhere.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from areal.base.errors import NoCapacity
from areal.base.types import Completion, Ending, Interaction, Limits, Message, SessionRequest, Share, Version
from areal.store import open_store, store_url

TIMEOUT = 100.0


@dataclass
class ModelSession:
    id: str
    active: float
    tokens: list[int] = field(default_factory=list)
    rewarded: bool = False
    ending: Ending | None = None
    late: bool = False
    awaits: bool = False  # its reward, from the run's own source

    def good(self) -> bool:
        failed = self.ending in (None, "reward_failed") or not self.tokens or self.late
        return not failed and (self.ending != "expired" or self.rewarded or self.awaits)


@dataclass
class ModelGroup:
    id: str
    task: str
    size: int
    deadline: float
    sessions: list[ModelSession] = field(default_factory=list)
    state: str = "running"  # accepted, consumed, dropped
    step: int = 0

    def settle(self, now: float) -> None:
        live = any(one.ending is None for one in self.sessions)
        enough = sum(one.good() for one in self.sessions) >= min(self.size, 2)
        full, overdue = len(self.sessions) == self.size, now >= self.deadline
        if any(one.awaits for one in self.sessions):
            return
        if self.state == "running" and (overdue or full) and (not live or (overdue and enough)):
            self.state = "accepted" if enough else "dropped"


class StoreMachine(RuleBasedStateMachine):
    @initialize(
        concurrent=st.integers(1, 4),
        lag=st.integers(0, 2),
        batch=st.integers(1, 2),
        size=st.integers(1, 3),
        scored=st.booleans(),
    )
    def open(self, concurrent: int, lag: int, batch: int, size: int, scored: bool) -> None:
        self.limits = Limits(concurrent, lag, batch, n_samples=size, group_timeout_s=TIMEOUT, scored=scored)
        self.groups: list[ModelGroup] = []
        self.now, self.label, self.step, self.begun = 0.0, 0, 0, 0
        self.folder = Path(tempfile.mkdtemp())
        self.runner = asyncio.Runner()
        self.store: Any = self.run(open_store(store_url(self.folder / "s.sqlite"), clock=lambda: self.now))
        self.run(self.store.training.set_limits(self.limits))

    def run(self, call: Any) -> Any:
        return self.runner.run(call)

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.run(self.store.__aexit__())
            self.runner.close()
            shutil.rmtree(self.folder)

    def of(self, *states: str) -> list[ModelGroup]:
        return [group for group in self.groups if group.state in states]

    def live(self) -> list[tuple[ModelGroup, ModelSession]]:
        return [(group, one) for group in self.groups for one in group.sessions if one.ending is None]

    def settle(self) -> None:
        for group in self.groups:
            group.settle(self.now)

    @rule(task=st.sampled_from("ab"))
    def begin(self, task: str) -> None:
        self.settle()
        self.begun += 1
        mine = [group for group in self.of("running") if group.task == task and group.deadline > self.now]
        group = mine[-1] if mine and len(mine[-1].sessions) < mine[-1].size else None
        pending = len(self.of("running", "accepted"))
        room = min(
            self.limits.max_concurrent - len(self.of("running")),
            (self.limits.max_lag + 1) * self.limits.batch_groups - pending,
        )
        try:
            session = self.run(self.store.sessions.begin(SessionRequest(task, f"k{self.begun}", "w")))
        except NoCapacity:
            assert group is None
            assert room <= 0
            # A refused call rolls back what it settled; the next look settles it again.
            self.run(self.store.training.ready())
            return
        assert group is not None or room > 0
        if group is None:
            group = ModelGroup(session.group_id, task, self.limits.n_samples, self.now + TIMEOUT)
            self.groups.append(group)
        assert (session.group_id, session.sample) == (group.id, len(group.sessions))
        group.sessions.append(ModelSession(session.id, self.now))

    @precondition(lambda self: self.live())
    @rule(data=st.data(), tokens=st.integers(0, 3))
    def add(self, data: st.DataObject, tokens: int) -> None:
        _, one = data.draw(st.sampled_from(self.live()))
        ids, floats = np.zeros(tokens, np.int32), np.zeros(tokens, np.float32)
        turn = len(one.tokens)
        done = Completion(ids, floats, ids, floats, 1.0, "stop")
        record = Interaction(f"{one.id}/{turn}", one.id, turn, ids, done, (), Message("assistant"))
        self.run(self.store.sessions.add(record))
        one.tokens.append(tokens)
        one.active = self.now

    @precondition(lambda self: any(one.tokens for _, one in self.live()))
    @rule(data=st.data())
    def reward(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from([one for _, one in self.live() if one.tokens]))
        self.run(self.store.sessions.reward(one.id, 1.0, None))
        one.rewarded, one.active = True, self.now

    @precondition(lambda self: self.live())
    @rule(data=st.data(), ending=st.sampled_from(["ended", "ended", "refreshed", "reward_failed"]))
    def end(self, data: st.DataObject, ending: Ending) -> None:
        group, one = data.draw(st.sampled_from(self.live()))
        self.run(self.store.sessions.end(one.id, ending))
        self.finish(group, one, ending)

    def finish(self, group: ModelGroup, one: ModelSession, ending: Ending) -> None:
        one.ending, one.late = ending, group.state != "running"
        one.awaits = self.limits.scored and not one.rewarded  # an expired one too, so `good` must see it already
        one.awaits = one.awaits and one.good()
        group.settle(self.now)

    @precondition(lambda self: any(one.awaits for group in self.groups for one in group.sessions))
    @rule(data=st.data(), failed=st.booleans())
    def score(self, data: st.DataObject, failed: bool) -> None:
        due = [(group, one) for group in self.groups for one in group.sessions if one.awaits]
        assert {one.session.id for one in self.run(self.store.rewards.waiting())} == {one.id for _, one in due}
        group, one = data.draw(st.sampled_from(due))
        assert self.run(self.store.rewards.write({one.id: None if failed else {None: 0.5}})) == (one.id,)
        one.awaits, one.rewarded = False, not failed
        if failed:
            one.ending = "reward_failed"  # counted as if it had ended like that
        group.settle(self.now)

    @rule(seconds=st.sampled_from([1.0, 30.0, TIMEOUT]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(idle=st.sampled_from([1.0, 30.0]))
    def expire(self, idle: float) -> None:
        due = [(group, one) for group, one in self.live() if one.active < self.now - idle]
        ended = self.run(self.store.sessions.expire(self.now - idle))
        assert {one.id for one in ended} == {one.id for _, one in due}
        for group, one in sorted(due, key=lambda pair: [session.id for session in ended].index(pair[1].id)):
            self.finish(group, one, "expired")

    @rule()
    def advance(self) -> None:
        self.settle()
        ready = self.run(self.store.training.ready())
        assert [group.id for group in ready] == [group.id for group in self.of("accepted")]
        self.label, self.step = self.label + 1, self.step + 1
        taken = self.of("accepted")[: self.limits.batch_groups]
        for group in taken:
            group.state, group.step = "consumed", self.step
            for one in group.sessions:
                if one.good():
                    masked = sum(one.tokens) // 2
                    shares = {"": Share(sum(one.tokens) - masked, len(one.tokens)), "greedy": Share(masked, 0)}
                    self.run(self.store.training.account(one.id, shares))
        version = Version(self.label, self.step, f"life {self.label}")
        self.run(self.store.training.advance(version, [group.id for group in taken]))

    @precondition(lambda self: self.of("accepted"))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.of("accepted")))
        self.run(self.store.training.drop([group.id], "stale"))
        group.state = "dropped"

    @precondition(lambda self: self.step)
    @rule(data=st.data())
    def recover(self, data: st.DataObject) -> None:
        step = data.draw(st.integers(0, self.step))
        lost = [group for group in self.of("consumed") if group.step > step]
        assert self.run(self.store.training.release_after(step, "the next life")) == len(lost)
        self.step = step
        for group in lost:
            group.state = "accepted"
        self.recovered = getattr(self, "recovered", 0) or len(lost)

    @invariant()
    def counts_agree_and_the_law_holds(self) -> None:
        if not hasattr(self, "store"):
            return
        self.settle()
        self.run(self.store.training.ready())
        counts = self.run(self.store.training.counts())
        assert counts.running == len(self.of("running")) <= self.limits.max_concurrent
        assert counts.accepted == len(self.of("accepted"))
        assert counts.consumed == len(self.of("consumed"))
        assert counts.running_sessions == len(self.live())
        assert counts.awaiting_reward == sum(one.awaits for group in self.groups for one in group.sessions)
        if not getattr(self, "recovered", 0):
            most = (self.limits.max_lag + 1) * self.limits.batch_groups
            assert counts.running + counts.accepted <= most
            # Slots never leak: what neither runs nor waits is free.
            free = min(self.limits.max_concurrent - counts.running, most - counts.running - counts.accepted)
            assert counts.free_slots == free
        assert self.run(self.store.reading.balance()).faults == ()
        fates: Counter[str] = Counter()
        for group in self.groups:
            for one in group.sessions:
                fate = "dropped" if group.state == "dropped" or (one.ending and not one.good()) else group.state
                fates[fate] += sum(one.tokens)
        pending = (
            fates["running"]
            + fates["accepted"]
            + sum(sum(one.tokens) for group in self.of("consumed") for one in group.sessions if one.ending is None)
        )
        accounted = counts.trained_tokens + counts.masked_tokens
        assert counts.recorded_tokens == sum(fates.values())
        assert counts.dropped_tokens == fates["dropped"]
        assert counts.recorded_tokens == accounted + counts.dropped_tokens + pending


TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
