"""The judge finds each kind of loss and doubling, and nothing in a run where all is well.

Each case is one good run with one thing broken in it; the sentence names the session or the group.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.faults import judge
from tests.faults.evidence import (
    Checkpoint,
    Held,
    HeldAnswer,
    HeldGroup,
    HeldSession,
    Published,
    Trained,
    checkpoints,
    read_held,
    trained,
)
from tests.faults.journal import Journal, Seen, read

NAMES = ["a", "b", "c", "<|im_end|>"]


@dataclass
class Run:
    """Four sessions in two groups: those of step 1 and 2, of which checkpoint 1 holds the first; a step 2 was lost before."""

    seen: dict[str, Seen]
    sessions: dict[str, HeldSession]
    answers: dict[str, HeldAnswer]
    groups: dict[str, HeldGroup]
    versions: list[Published]
    rows: list[Trained]
    saved: dict[int, Checkpoint]
    exported: dict[str, Any]

    @property
    def held(self) -> Held:
        return Held(self.sessions, self.answers, self.groups, tuple(self.versions))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    journal = Journal(tmp_path / "a.jsonl")
    for k in range(4):
        name, request = f"t{k // 2}" + "-1" * (k % 2), f"r{k}"
        journal.write("starting", request=request, task=f"t{k // 2}", after="")
        journal.write("started", request=request, session=name, key=f"key-{k}", after="")
        for _ in range(2):  # the first try brings nothing
            journal.write("sent", request=request)
        shown = {"tokens": ["a", "<|im_end|>"], "logprobs": [-0.5, -0.25]}
        journal.write("answered", request=request, call=0, id=f"answer-{k}", text="a", finish="stop", **shown)
        journal.write("rewarding", request=request, id=f"answer-{k}", value=0.5)
        journal.write("rewarded", request=request, id=f"answer-{k}", value=0.5)
        journal.write("ending", request=request)
        journal.write("ended", request=request, count=1)
    names = [f"t{k // 2}" + "-1" * (k % 2) for k in range(4)]
    return Run(
        seen=read(tmp_path),
        sessions={
            name: HeldSession(name, f"r{k}", f"g{k // 2 + 1}", "ended", "", {"": 2}) for k, name in enumerate(names)
        },
        answers={f"answer-{k}": HeldAnswer(f"answer-{k}", name, 2, 0.5) for k, name in enumerate(names)},
        groups={f"g{k}": HeldGroup(f"g{k}", f"t{k - 1}", True, k, "new" if k == 2 else "old") for k in (1, 2)},
        versions=[
            Published(0, 0, "old"),
            Published(1, 1, "old"),
            Published(2, 2, "old"),  # lost
            Published(3, 1, "new"),
            Published(4, 2, "new"),
        ],
        rows=[Trained(1, 1, 2, 4, 4, 1, 1.0), Trained(2, 2, 2, 4, 4, 1, 2.0), Trained(2, 4, 2, 4, 4, 1, 3.0)],
        saved={1: Checkpoint(1, 1), 2: Checkpoint(2, 2)},
        exported={name: exported(f"answer-{k}") for k, name in enumerate(names)},
    )


def exported(answer: str) -> dict[str, Any]:
    logprobs = [-0.5, -0.25]
    return {
        "interactions": [
            {"id": answer, "output_ids": [0, 3], "logprobs": logprobs, "versions": [0, 0], "finished_at": 5.0}
        ],
        "trajectories": [
            {
                "token_ids": [1, 2, 0, 3],
                "logprobs": [0.0, 0.0, *logprobs],
                "spans": [{"interaction_id": answer, "start": 2, "end": 4}],
            }
        ],
    }


def everything(run: Run) -> list[str]:
    return [
        *judge.clients(run.seen, run.held, run.seen),
        *judge.steps(run.held, 1),
        *judge.trainer(run.held, run.rows, run.saved),
        *judge.accounts(run.held),
        *judge.fates(run.seen, run.held, dict.fromkeys(run.sessions, 0), run.rows, 1),
        *judge.labels(run.held, run.exported, {"old": 4.0, "new": 6.0}),
        *judge.tokens(run.seen, run.exported, NAMES),
    ]


def test_a_good_run_is_clean(run: Run) -> None:
    assert everything(run) == []
    assert judge.kept_consumption(run.held, run.held, saved=2) == []
    assert judge.resumed(Held({}, {}, {}, tuple(run.versions[:3])), run.held, saved=1, since=[1]) == []


BROKEN: dict[str, Callable[[Run], Any]] = {
    "answer answer-1 of session t0-1 was read to its end and is not in the store": lambda run: run.answers.pop(
        "answer-1"
    ),
    "session t1 was started and is not in the store": lambda run: run.sessions.pop("t1"),
    "reward 0.5 of answer answer-0 (session t0) is None in the store": lambda run: change(
        run.answers, "answer-0", reward=None
    ),
    "reward 0.5 of answer answer-0 (session t0) is -1.0 in the store": lambda run: change(
        run.answers, "answer-0", reward=-1.0
    ),
    "the reward of session t0 went to answer-7": lambda run: run.seen["r0"].rewards.update({"answer-7": 1.0}),
    "session t0 was ended, its client was told, and in the store it is running": lambda run: change(
        run.sessions, "t0", ending=""
    ),
    "session t0 is expired in the store and its client never ended it": lambda run: (
        change(run.sessions, "t0", ending="expired"),
        setattr(run.seen["r0"], "left", ""),
        setattr(run.seen["r0"], "leaving", False),
    ),
    "session t0 holds 2 answers that nobody read, of 1 requests without one": lambda run: [
        run.answers.update({name: HeldAnswer(name, "t0", 2)}) for name in ("x", "y")
    ],
    "session t0 ended with 1 interactions and holds 2": lambda run: run.answers.update({"x": HeldAnswer("x", "t0", 2)}),
    "r0 was started as ['t0', 't7']": lambda run: run.sessions.update(
        {"t7": HeldSession("t7", "r0", "g1", "ended", "", {})}
    ),
    "session t7 was started by nobody": lambda run: run.sessions.update(
        {"t7": HeldSession("t7", "r7", "g1", "ended", "", {})}
    ),
    "session t0 was given to r0 and belongs to r1": lambda run: change(run.sessions, "t0", request="r1"),
    "t0 was refused: 401: no such key": lambda run: run.seen["r0"].refused.append("401: no such key"),
    "500: internal error": lambda run: run.seen["r0"].strange.append("500: internal error"),
    "group g2 (t1) counts as trained by step 2 of old, which is lost": lambda run: change(
        run.groups, "g2", incarnation="old"
    ),
    "step 2 stands in the trainer's log under version 4 and has consumed nothing": lambda run: change(
        run.groups, "g2", step=None, incarnation=""
    ),
    "step 1 has consumed 2 groups, not 1": lambda run: change(run.groups, "g2", step=1, incarnation="old"),
    "group g1 (t0) is trained and was stale": lambda run: change(run.groups, "g1", dropped="stale"),
    "group g1 (t0) is trained and was never complete": lambda run: change(run.groups, "g1", accepted=False),
    "step 1: the trainer says (sessions, recorded, trained tokens) (2, 4, 4), the store says (2, 4, 3)": lambda run: (
        change(run.sessions, "t0", account={"": 1, "stale": 1})
    ),
    "step 2 stands twice in the trainer's log under version 4": lambda run: run.rows.append(run.rows[-1]),
    "checkpoint 2 holds step 1, which is not in the trainer's log": lambda run: run.rows.pop(0),
    "checkpoint 2 holds 3 updates, the trainer's log has 2 up to it": lambda run: run.saved.update(
        {2: Checkpoint(2, 3)}
    ),
    "session t0 recorded 2 tokens, and 1 are accounted for": lambda run: change(run.sessions, "t0", account={"": 1}),
    "session t0 belongs to no group": lambda run: change(run.sessions, "t0", group=""),
    "session t0 was ended by its client and is dropped (late)": lambda run: change(run.sessions, "t0", dropped="late"),
    "session t0 was ended by its client, its group is dropped (too_few_survivors)": lambda run: change(
        run.groups, "g1", dropped="too_few_survivors"
    ),
    "group g2 (t1) was dropped as stale at step 1, its newest token is of step 0": lambda run: change(
        run.groups, "g2", step=None, incarnation="", dropped="stale", dropped_at=0.5
    ),
    "answer answer-0 of session t0 is not exported": lambda run: run.exported["t0"]["interactions"].clear(),
    "answer answer-0 of session t0 was shown as 'a' and is recorded otherwise": lambda run: run.exported["t0"][
        "interactions"
    ][0].update(output_ids=[1, 3]),
    "answer answer-0 of session t0 stands in 2 training rows": lambda run: run.exported["t0"]["trajectories"].append(
        run.exported["t0"]["trajectories"][0]
    ),
    "the training row of answer answer-0 (session t0) is not what the client was shown": lambda run: run.exported["t0"][
        "trajectories"
    ][0]["logprobs"].__setitem__(2, -0.6),
}


def change(rows: dict[str, Any], name: str, **values: Any) -> None:
    rows[name] = replace(rows[name], **values)


@pytest.mark.parametrize("sentence", BROKEN)
def test_each_loss_and_doubling_is_found_and_named(run: Run, sentence: str) -> None:
    BROKEN[sentence](run)
    assert any(one.startswith(sentence) for one in everything(run)), everything(run)


@pytest.mark.parametrize(("label", "stands_for"), [(3, "new"), (9, "nobody")])
def test_a_label_that_is_used_again_is_found(run: Run, label: int, stands_for: str) -> None:
    run.exported["t0"]["interactions"][0]["versions"] = [0, label]
    [found] = everything(run)
    assert found == (
        f"answer answer-0 of session t0 was sampled in life old under label {label}, which stands for weights of {stands_for}"
    )


def test_a_label_that_was_taken_and_nothing_was_consumed_by_it_is_no_step(run: Run) -> None:
    run.versions.append(Published(5, 3, "new"))
    assert everything(run) == []
    run.versions.append(Published(6, 4, "new"))
    assert everything(run) == ["step 3 has consumed 0 groups, not 1"]


def test_a_reward_may_be_one_that_was_sent_and_not_acknowledged(run: Run) -> None:
    run.seen["r0"].tried["answer-0"] = {0.75}
    change(run.answers, "answer-0", reward=0.75)
    assert everything(run) == []


def test_what_happened_between_two_looks_is_no_fault(run: Run) -> None:
    """The store is read after the one look at the journals and before the other."""
    earlier, later = deepcopy(run.seen), run.seen
    earlier["r0"] = Seen("r0", task="t0", session="t0", key="key-0")
    del earlier["r1"]
    later["r0"].rewards["answer-0"] = 0.25
    assert judge.clients(earlier, run.held, later) == []
    change(run.answers, "answer-1", reward=0.75)
    later["r1"].tried["answer-1"] = {0.75}
    assert judge.clients(earlier, run.held, later) == []


def test_a_group_that_was_too_old_is_no_loss(run: Run) -> None:
    change(run.groups, "g2", step=None, incarnation="", dropped="stale", dropped_at=9.0)
    newest = dict.fromkeys(run.sessions, 0)
    assert judge.fates(run.seen, run.held, newest, run.rows, 1) == []


@pytest.mark.parametrize(
    ("group", "sentence"),
    [
        (HeldGroup("g1", "t0", True), "which checkpoint 1 holds, and is now waiting: it would be trained twice"),
        (HeldGroup("g1", "t0", True, 2, "new"), "is now trained by step 2 of new: it would be trained twice"),
        (HeldGroup("g1", "t0", True, dropped="stale"), "is now dropped (stale)"),
        (None, "group g1 (t0) is gone from the store"),
    ],
)
def test_what_a_checkpoint_holds_is_never_given_back(run: Run, group: HeldGroup | None, sentence: str) -> None:
    before = deepcopy(run.held)
    run.groups = {"g2": run.groups["g2"]} | ({"g1": group} if group else {})
    [found] = judge.kept_consumption(before, run.held, saved=1)
    assert sentence in found
    assert judge.kept_consumption(before, run.held, saved=0) == ([] if group else [found])


def test_what_was_dropped_does_not_come_back(run: Run) -> None:
    before = Held({}, {}, {"g9": HeldGroup("g9", "t9", True, dropped="stale")}, ())
    after = Held({}, {}, {"g9": HeldGroup("g9", "t9", True)}, ())
    assert judge.kept_consumption(before, after, 0) == ["group g9 (t9) was dropped (stale) and is now waiting"]


def test_a_resume_starts_at_its_checkpoint_and_hands_back_what_that_does_not_hold(run: Run) -> None:
    before = Held({}, {}, {}, tuple(run.versions[:3]))
    [found] = judge.resumed(before, run.held, saved=2, since=[1, 2])
    assert found == "the run went on from step 1, and its newest complete checkpoint is of step 2"
    [found] = judge.resumed(before, run.held, saved=0, since=[0])
    assert found == "the run went on from step 1, and its newest complete checkpoint is of step 0"
    assert judge.resumed(before, run.held, saved=0, since=[0, 1]) == []  # an orphan completed it meanwhile
    change(run.groups, "g2", incarnation="old")
    [found] = judge.resumed(before, run.held, saved=1, since=[1])
    assert found.endswith("which no checkpoint holds: it is skipped")


def test_evidence_is_read_from_what_a_run_leaves(tmp_path: Path) -> None:
    """A line that a kill cut, a checkpoint without its state and a folder without a store are no evidence."""
    assert read_held(tmp_path) == Held({}, {}, {}, ())
    (tmp_path / "logs").mkdir()
    row = {"step": 3, "time": 9.0, "train/version": 5, "train/sessions": 4}
    row |= {"train/recorded_tokens": 40, "train/trained_tokens": 30, "train/updates": 1}
    (tmp_path / "logs" / "metrics.jsonl").write_text(
        json.dumps(row) + '\n{"step": 4, "eval/reward": 1}\n{"step": 5, "tr'
    )
    assert trained(tmp_path) == [Trained(4, 5, 4, 40, 30, 1, 9.0)]
    (tmp_path / "checkpoints" / "step-000004").mkdir(parents=True)
    assert checkpoints(tmp_path) == {}
