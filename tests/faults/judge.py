"""What clients saw against what the service holds: each function finds one kind of loss or doubling, a plain sentence for each case.

    for sentence in clients(seen, held, seen): ...              # after each kill: what was acknowledged is there, and nothing twice
    steps(held, groups_per_step=2); kept_consumption(before, after, saved=4); resumed(before, after, saved=4, since=[])
    trainer(held, rows, saved); accounts(held); fates(seen, held, …); labels(held, exported, lives); tokens(seen, exported, names)

Pure: no clock, no files. An empty list is a clean bill. Used by campaign.py; test_judge.py shows that each finds what it is for.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any

from tests.faults.evidence import Checkpoint, Held, HeldGroup, Trained
from tests.faults.journal import Seen

SAME = 1e-6  # log-probs travel as float32 and as decimal text


def clients(seen: Mapping[str, Seen], held: Held, later: Mapping[str, Seen]) -> list[str]:
    """Everything a client got an answer for is held once, and nothing that no client asked for.

    seen: the journals as they were before the store was read, so the store has at least that; later: after it, so it has at most that."""
    by_request = defaultdict(list)
    for session in held.sessions.values():
        by_request[session.request].append(session.id)
    unknown = [f"session {ids[0]} was started by nobody" for request, ids in by_request.items() if request not in later]
    doubled = [f"{request} was started as {ids}" for request, ids in by_request.items() if request and len(ids) > 1]
    answers = defaultdict(set)
    for answer in held.answers.values():
        answers[answer.session].add(answer.id)
    found = unknown + doubled
    for one in seen.values():
        found += one.strange + [f"{one.session or one.request} was refused: {said}" for said in one.refused]
        if one.session:
            found += _session(one, held, answers[one.session], later[one.request])
    return found


def _session(seen: Seen, held: Held, recorded: Set[str], later: Seen) -> list[str]:
    session = held.sessions.get(seen.session)
    if session is None:
        return [f"session {seen.session} was started and is not in the store"]
    found = []
    if session.request != seen.request:
        found.append(f"session {seen.session} was given to {seen.request} and belongs to {session.request}")
    found += [
        f"answer {name} of session {seen.session} was read to its end and is not in the store"
        for name in seen.answers.keys() - recorded
    ]
    found += [*_rewards(seen, held, later), *_ending(seen, session.ending, later)]
    unseen, tries = len(recorded - later.answers.keys()), later.sent - len(later.answers)
    if unseen > tries:
        found.append(f"session {seen.session} holds {unseen} answers that nobody read, of {tries} requests without one")
    if seen.counted is not None and seen.counted != len(recorded):
        found.append(f"session {seen.session} ended with {seen.counted} interactions and holds {len(recorded)}")
    return found


def _rewards(seen: Seen, held: Held, later: Seen) -> list[str]:
    found = []
    for name, value in seen.rewards.items():
        if name not in seen.answers:
            found.append(f"the reward of session {seen.session} went to {name}, an answer that its client never got")
            continue
        answer = held.answers.get(name)
        if answer is not None and answer.reward not in {value, later.rewards[name], *later.tried.get(name, ())}:
            found.append(f"reward {value} of answer {name} (session {seen.session}) is {answer.reward} in the store")
    return found


def _ending(seen: Seen, ending: str, later: Seen) -> list[str]:
    if seen.left and ending != seen.left:
        return [
            f"session {seen.session} was {seen.left}, its client was told, and in the store it is {ending or 'running'}"
        ]
    if ending and not later.leaving:
        return [f"session {seen.session} is {ending} in the store and its client never ended it"]
    return []


def steps(held: Held, groups_per_step: int) -> list[str]:
    """Every step of the surviving timeline has consumed exactly its groups, and no step of a lost one still holds any."""
    timeline = held.timeline
    found, taken = [], Counter[int]()
    for group in held.groups.values():
        if group.step is None:
            continue
        version = timeline.get(group.step)
        if version is None or version.incarnation != group.incarnation:
            found.append(
                f"group {group.id} ({group.task}) counts as trained by step {group.step} of {group.incarnation}, which is lost"
            )
        else:
            taken[group.step] += 1
            if not group.accepted or group.dropped:
                found.append(f"group {group.id} ({group.task}) is trained and was {group.dropped or 'never complete'}")
    return found + [
        f"step {step} has consumed {taken[step]} groups, not {groups_per_step}"
        for step in sorted(timeline)
        if step > min(timeline) == 0 and taken[step] != groups_per_step
    ]


def kept_consumption(before: Held, after: Held, saved: int) -> list[str]:
    """What a checkpoint of step `saved` holds stays trained by the same step for ever; what is dropped stays dropped."""
    found = []
    for group in before.groups.values():
        now = after.groups.get(group.id)
        if now is None:
            found.append(f"group {group.id} ({group.task}) is gone from the store")
        elif group.step is not None and group.step <= saved and _trained_by(now) != _trained_by(group):
            found.append(
                f"group {group.id} ({group.task}) was trained by step {group.step}, which checkpoint {saved} holds, and is "
                f"now {_state(now)}: it would be trained twice"
            )
        elif group.dropped and now.dropped != group.dropped:
            found.append(f"group {group.id} ({group.task}) was dropped ({group.dropped}) and is now {_state(now)}")
    return found


def _trained_by(group: HeldGroup) -> tuple[int | None, str]:
    return group.step, group.incarnation


def _state(group: HeldGroup) -> str:
    if group.dropped:
        return f"dropped ({group.dropped})"
    return "waiting" if group.step is None else f"trained by step {group.step} of {group.incarnation}"


def resumed(before: Held, after: Held, saved: int, since: Collection[int]) -> list[str]:
    """The run goes on from its newest complete checkpoint (0: none), and hands back exactly what later steps had consumed.

    saved: the newest when the life before was seen dead; since: all that are complete now, for a process that outlived its controller
    for a moment may have completed one more."""
    former = {version.incarnation for version in before.versions}
    own = [version for version in after.versions if version.incarnation not in former]
    if not own:
        return []  # it died before it had said so
    found, start = [], own[0].step
    if start != saved and not (start > saved and start in since):
        found.append(f"the run went on from step {start}, and its newest complete checkpoint is of step {saved}")
    for group in after.groups.values():
        if group.step is not None and group.step > start and group.incarnation in former:
            found.append(
                f"group {group.id} ({group.task}) counts as trained by step {group.step}, which no checkpoint holds: it is skipped"
            )
    return found


def trainer(held: Held, rows: Iterable[Trained], saved: Mapping[int, Checkpoint]) -> list[str]:
    """The trainer's own log, the store's consumption and the checkpoints tell of the same steps."""
    timeline, found = held.timeline, []
    members, recorded, trained = Counter[int](), Counter[int](), Counter[int]()
    for session in held.sessions.values():
        group = held.groups.get(session.group)
        if group is not None and group.step is not None:
            members[group.step] += not session.dropped
            recorded[group.step] += sum(session.account.values())
            trained[group.step] += session.account.get("", 0)
    updates, logged = Counter[int](), set[int]()
    newest = held.versions[-1].label if held.versions else -1
    for row in rows:
        if row.label == newest and row.step not in timeline:
            found.append(f"step {row.step} stands in the trainer's log under version {newest} and has consumed nothing")
        version = timeline.get(row.step)
        if version is None or version.label != row.label:
            continue  # of a lost timeline
        if row.step in logged:
            found.append(f"step {row.step} stands twice in the trainer's log under version {row.label}")
        logged.add(row.step)
        updates[row.step] = row.updates
        theirs = (row.sessions, row.recorded_tokens, row.trained_tokens)
        ours = (members[row.step], recorded[row.step], trained[row.step])
        if theirs[1:] != ours[1:] or theirs[0] > ours[0]:
            found.append(
                f"step {row.step}: the trainer says (sessions, recorded, trained tokens) {theirs}, the store says {ours}"
            )
    for step, checkpoint in saved.items():
        if step not in timeline or min(timeline) > 0:
            continue
        missing = [one for one in range(1, step + 1) if one not in logged]
        if missing:
            found.append(f"checkpoint {step} holds step {missing[0]}, which is not in the trainer's log")
        elif checkpoint.updates != (total := sum(updates[one] for one in range(1, step + 1))):
            found.append(
                f"checkpoint {step} holds {checkpoint.updates} updates, the trainer's log has {total} up to it"
            )
    return found


def accounts(held: Held) -> list[str]:
    """Every token of a session that a step has consumed is trained, or masked for a reason."""
    recorded = Counter[str]()
    for answer in held.answers.values():
        recorded[answer.session] += answer.tokens
    found = []
    for session in held.sessions.values():
        group = held.groups.get(session.group)
        if group is None or group.step is None or session.dropped:
            continue
        if (total := sum(session.account.values())) != recorded[session.id]:
            found.append(f"session {session.id} recorded {recorded[session.id]} tokens, and {total} are accounted for")
    return found


def fates(
    seen: Mapping[str, Seen], held: Held, newest: Mapping[str, int], reached: Sequence[Trained], lag: int
) -> list[str]:
    """At the end: each session that its client ended well is trained, waits for its turn, or was too old, and that can be shown.

    newest: session -> the newest label of its tokens. reached: when each step was taken."""
    steps_of = {version.label: version.step for version in held.versions}
    found = []
    for one in seen.values():
        session = held.sessions.get(one.session)
        if session is None or not one.left or not one.answers:
            continue
        group = held.groups.get(session.group)
        if group is None:
            found.append(f"session {session.id} belongs to no group")
        elif session.dropped:
            found.append(f"session {session.id} was ended by its client and is dropped ({session.dropped})")
        elif group.dropped == "stale":
            label = max(newest.get(name, 0) for name in held.sessions if held.sessions[name].group == group.id)
            step = max((row.step for row in reached if row.at <= group.dropped_at), default=0) + 1
            if step - steps_of[label] <= lag:
                found.append(
                    f"group {group.id} ({group.task}) was dropped as stale at step {step}, its newest token is of step {steps_of[label]}"
                )
        elif group.dropped:
            found.append(f"session {session.id} was ended by its client, its group is dropped ({group.dropped})")
    return found


def labels(held: Held, exported: Mapping[str, Mapping[str, Any]], lives: Mapping[str, float]) -> list[str]:
    """Each token carries a label of the life that sampled it: none is used again for other weights. lives: incarnation -> when it
    was started (seconds since the epoch)."""
    lived_by = {version.label: version.incarnation for version in held.versions}
    found = []
    for session, body in exported.items():
        for one in body["interactions"]:
            life = max((start, name) for name, start in lives.items() if start <= one["finished_at"])[1]
            if strange := sorted({label for label in one["versions"] if lived_by.get(label) != life}):
                found.append(
                    f"answer {one['id']} of session {session} was sampled in life {life} under label {strange[0]}, which stands for "
                    f"weights of {lived_by.get(strange[0], 'nobody')}"
                )
    return found


def tokens(seen: Mapping[str, Seen], exported: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """The training rows hold, token for token, what the client was shown. exported: session -> what /rl/export_trajectories says.
    names: what each token id is shown as."""
    found = []
    for one in seen.values():
        if one.session not in exported:
            continue
        body = exported[one.session]
        recorded = {each["id"]: each for each in body["interactions"]}
        rows = defaultdict(list)
        for row in body["trajectories"]:
            for span in row["spans"]:
                rows[span["interaction_id"]].append((row, span))
        for name, answer in one.answers.items():
            theirs = recorded.get(name)
            if theirs is None:
                found.append(f"answer {name} of session {one.session} is not exported")
                continue
            shown = [names[number] for number in theirs["output_ids"]]
            if shown != list(answer.tokens) or not _close(theirs["logprobs"], answer.logprobs):
                found.append(
                    f"answer {name} of session {one.session} was shown as {answer.text!r} and is recorded otherwise"
                )
            if len(rows[name]) != 1:
                found.append(f"answer {name} of session {one.session} stands in {len(rows[name])} training rows")
            for row, span in rows[name]:
                ids = row["token_ids"][span["start"] : span["end"]]
                logprobs = row["logprobs"][span["start"] : span["end"]]
                if ids != theirs["output_ids"] or not _close(logprobs, answer.logprobs):
                    found.append(
                        f"the training row of answer {name} (session {one.session}) is not what the client was shown"
                    )
    return found


def _close(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and all(
        math.isclose(a, b, rel_tol=SAME, abs_tol=SAME) for a, b in zip(one, other, strict=True)
    )
