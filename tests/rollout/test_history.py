"""steps.jsonl: what is read back, on which timeline, and what a replay refuses before it starts anything."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

from areal.base.metrics import MetricsFile
from areal.base.types import Version
from areal.replay import main
from areal.rollout import metrics as _declared  # noqa: F401  declares train/…
from areal.rollout.account import settle
from areal.rollout.history import History, Life, read_history, session_digests

LIFE = Life("one", 0, "", {"seed": 1}, {"policy": {"model_dir": "/nowhere"}}, {"torch": "2"})


async def made(batching, played, *, tasks: str = "ab"):
    gate, batcher = await batching(batch=len(tasks))
    for task in tasks:
        await played.session(task)
    return gate, await batcher.next_batch()


async def test_a_step_is_read_back_as_it_was_trained(batching, played, tmp_path: Path) -> None:
    gate, batch = await made(batching, played)
    path = tmp_path / "steps.jsonl"
    with History.open(path, LIFE) as history:
        history.write(batch, step=0, made=Version(1, 1, "one"))
    assert os.stat(path).st_mode & 0o077 == 0
    found = read_history(path)
    assert (found.lives, found.altered) == ((LIFE,), ())
    step = found.steps[0]
    assert (step.weights, step.made, step.lags) == (gate.current.label, Version(1, 1, "one"), {0: 0})
    digests = session_digests(batch.groups)
    assert step.groups == {group.id: {group.task_id: digests[group.task_id]} for group in batch.groups}
    changed = replace(batch.groups[0].trajectories[0], logprobs=batch.groups[0].trajectories[0].logprobs * 2)
    assert session_digests((replace(batch.groups[0], trajectories=(changed,)),)) != {"a": digests["a"]}


async def test_a_resume_forgets_what_the_lost_timeline_had_reached(batching, played, tmp_path: Path) -> None:
    _, batch = await made(batching, played)
    path = tmp_path / "steps.jsonl"
    with History.open(path, LIFE) as history:
        for step in range(5):
            history.write(batch, step=step, made=Version(step + 1, step + 1, "one"))
    path.write_bytes(path.read_bytes()[:-20])  # and a crash cut its last line
    with History.open(path, replace(LIFE, incarnation="two", first_step=2, started_from="step-000002")) as history:
        history.write(batch, step=2, made=Version(7, 3, "two"))
    found = read_history(path)
    assert {step: one.made.label for step, one in found.steps.items()} == {0: 1, 1: 2, 2: 7}
    assert [life.incarnation for life in found.lives] == ["one", "two"]
    assert [found.life_of(step).incarnation for step in range(3)] == ["one", "one", "two"]


async def test_a_line_that_was_edited_is_known(batching, played, tmp_path: Path) -> None:
    _, batch = await made(batching, played)
    path = tmp_path / "steps.jsonl"
    with History.open(path, LIFE) as history:
        history.write(batch, step=0, made=Version(1, 1, "one"))
    path.write_text(path.read_text().replace('"seed":1', '"seed":2'))
    assert read_history(path).altered == (1,)


async def test_what_cannot_be_made_again_is_a_sentence(store, batching, played, tmp_path: Path, capsys) -> None:
    gate, batch = await made(batching, played)
    (tmp_path / "model").mkdir()
    life = replace(LIFE, incarnation="test", ranks={"policy": {"model_dir": str(tmp_path / "model")}})
    await settle(store.training, batch)
    version = gate.next_version()
    await gate.advance(version, batch.group_ids)
    with History.open(tmp_path / "steps.jsonl", life) as history:
        history.write(batch, step=0, made=version)
        history.write(batch, step=2, made=Version(3, 3, "test"))
    MetricsFile(tmp_path / "logs" / "metrics.jsonl", "run").close()

    async def refused(step: int) -> str:
        code = await asyncio.to_thread(main, [str(tmp_path), "--step", str(step)])
        assert code == 2
        return capsys.readouterr().err

    assert "step 7 is not in " in await refused(7)
    assert "step 1 lies between" in await refused(2)
    path, ours = tmp_path / "steps.jsonl", (tmp_path / "steps.jsonl").read_bytes()
    path.write_bytes(b"")
    with History.open(path, replace(life, config={"unheard_of": 1}, software={"areal": "9.0.0"})) as history:
        history.write(batch, step=0, made=version)
    assert "its configuration is of areal 9.0.0 and means nothing to " in await refused(0)
    path.write_bytes(ours)
    await store.sessions.exclude("b", delete=True)  # after it was trained: its sums stay
    assert "step 0 cannot be made again: the content of session 'b' was deleted" in await refused(0)
    path.write_bytes(b"")
    with History.open(path, replace(life, first_step=5, started_from="step-000005")) as history:
        history.write(batch, step=5, made=version)
    assert "step 5 has no recovery state before it (none is left)" in await refused(5)
    path.unlink()
    assert "holds no steps.jsonl" in await refused(0)
