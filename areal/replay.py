"""Make a training step of a run again, from what it recorded: the same batch, the same loss, bit for bit on a CPU.

    areal replay runs/my-exp/trial-0 --step 12
    areal replay runs/my-exp/trial-0 --step 12 --dump step-12.jsonl       # its rows, for a person to look at

The weights of a step are those of the nearest earlier recovery state (or of the model the run began with), with the steps between
made again too. Rows, ages, advantages, packing and the optimizer are the run's own code in the run's own rank processes; only the
sampling is not done again: its tokens are in the store. What differs from steps.jsonl, the store or metrics.jsonl is said. Nothing in the
run folder is changed, and the run may live. Exit codes: 0 bit-equal, 1 something differs or a process failed, 2 it cannot be made again
(the reason says what is missing). docs/accounting.md tells more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError

from areal import __version__
from areal.base.errors import ArealError, CheckpointError, ConfigError
from areal.base.redact import redact
from areal.base.types import Version
from areal.cluster import start_scheduler
from areal.cluster.run_folder import RunFolder
from areal.config.run import RunConfig
from areal.engine.checkpoint_files import checkpoints, damage, read_mark
from areal.engine.place import rank_jobs
from areal.models.fetch import resolve
from areal.rollout.batch import Batch, batch_of, checked_ages
from areal.rollout.history import Life, Recorded, Trained, read_history, session_digests
from areal.rollout.queue import read_group
from areal.rollout.staleness import StalenessGate
from areal.store import open_store
from areal.store.base import EndedGroup, Store
from areal.store.location import find_store

if TYPE_CHECKING:
    from areal.engine.nets import Nets, Prepared

CLOCKS = frozenset({"seconds"})  # of a step's stats, those that no replay can repeat
READY_S = 300.0


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the weights come from. restored: a recovery state, not the model alone."""

    path: Path
    step: int
    restored: bool


@dataclass(frozen=True, slots=True)
class Made:
    """A step that was made again. differences: what is not as it was, in words; empty where all of it is."""

    step: int
    groups: int
    sessions: int
    rows: int
    stats: Mapping[str, float]
    differences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """A run folder as a replay reads it. ended: step -> the groups it trained."""

    history: Recorded
    metrics: Mapping[int, Mapping[str, float]]
    store: Store
    ended: Mapping[int, Sequence[EndedGroup]]


async def replay(folder: Path, step: int, dump: Path | None = None) -> AsyncIterator[Origin | Made]:
    """First the origin, then every step from there to `step`, the last one in `dump` too. Raises ConfigError where it cannot be done."""
    if not (folder / "steps.jsonl").is_file():
        raise ConfigError(f"{folder} holds no steps.jsonl; give the folder of a run that has trained a step")
    store_url = find_store(folder)
    history = read_history(folder / "steps.jsonl")
    if step not in history.steps:
        known = f"{min(history.steps)} to {max(history.steps)}" if history.steps else "none"
        raise ConfigError(f"step {step} is not in {folder / 'steps.jsonl'}; it has {known}")
    metrics = RunFolder.existing(folder).metrics().rows
    origin = await asyncio.to_thread(_origin, folder, history, step)
    yield origin
    async with await open_store(store_url, read_only=True) as store:
        ended = {one: await _ended(store, history.steps[one]) for one in range(origin.step, step + 1)}
        run = Run(history, metrics, store, ended)
        with tempfile.TemporaryDirectory(prefix="areal-replay-") as scratch:
            wanted = range(origin.step, step + 1)
            for number, (_, steps) in enumerate(groupby(wanted, key=lambda one: history.life_of(one).incarnation)):
                life_steps = list(steps)
                root, follows = Path(scratch) / f"life-{number}", life_steps[-1] < step
                async with _nets(history.life_of(life_steps[0]), origin, root) as (nets, config):
                    for one in life_steps:
                        yield await _make(run, nets, config, one, dump if one == step else None)
                    if follows:  # the next life took up exactly this state
                        origin = Origin(root / f"step-{life_steps[-1] + 1:06d}", life_steps[-1] + 1, True)
                        await nets.save(str(origin.path), origin.step, full=True)


def _origin(folder: Path, history: Recorded, step: int) -> Origin:
    """The nearest whole recovery state at or before the step; else the model, where every step is recorded."""
    passed = []
    for found in checkpoints(folder / "checkpoints"):
        if found.step > step:
            continue
        try:
            resumable = read_mark(found.path).resumable
        except CheckpointError:
            resumable = True  # `damage` says what is wrong
        reason = damage(found.path, recovery=True) if resumable else "it is a model and no recovery state"
        if reason is None:
            return _whole(Origin(found.path, found.step, True), history, step)
        passed.append(f"{found.path.name}: {reason}")
    life = history.lives[0]
    model = Path(str(life.ranks["policy"]["model_dir"]))
    if life.first_step == 0 and not life.started_from:
        path = model if model.is_dir() else resolve(str(life.ranks["policy"]["model_dir"]))
        return _whole(Origin(path, 0, False), history, step)
    raise ConfigError(
        f"step {step} has no recovery state before it ({'; '.join(passed) or 'none is left'}) and the run's first steps are not recorded; "
        "steps after the oldest kept recovery state can be made again (recover.freq_steps makes more of them)"
    )


def _whole(origin: Origin, history: Recorded, step: int) -> Origin:
    missing = [one for one in range(origin.step, step) if one not in history.steps]
    if missing:
        raise ConfigError(
            f"step {missing[0]} lies between {origin.path} and step {step} and is not recorded in steps.jsonl; nothing can stand in for it"
        )
    return origin


@asynccontextmanager
async def _nets(life: Life, origin: Origin, root: Path) -> AsyncIterator[tuple[Nets, RunConfig]]:
    """The ranks of a life, started as it started them, with the weights of the origin."""
    config = _config_of(life)
    from areal.assemble import nets_of  # torch comes with it: --help and a wrong folder do not wait for that
    from areal.engine.client import EngineClient

    folder = RunFolder(root, root, root / "logs")
    folder.create()
    async with AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(start_scheduler(config, folder))
        ranks = {}
        for net, spec in life.ranks.items():
            moves = net == "policy" and not spec.get(
                "lora"
            )  # an adapter stands beside the model that the run began with
            settings = dict(spec) | ({"model_dir": str(origin.path)} if moves else {})
            jobs = rank_jobs(net, settings, scheduler, folder.processes, within_s=READY_S)
            processes = await scheduler.start(*jobs)
            leader, *_ = await asyncio.gather(*(process.ready(READY_S) for process in processes))
            ranks[net] = await stack.enter_async_context(EngineClient(leader["url"], scheduler.run_token))
        nets = nets_of(config, life.ranks, ranks)
        if origin.restored:
            await nets.restore(str(origin.path))
        yield nets, config


def _config_of(life: Life) -> RunConfig:
    try:
        return RunConfig.model_validate(life.config)
    except ValidationError as error:
        raise ConfigError(
            f"its configuration is of areal {life.software.get('areal', '?')} and means nothing to {__version__} ({error.errors()[0]['msg']}); "
            "replay it with the release that trained it"
        ) from None


async def _make(run: Run, nets: Nets, config: RunConfig, step: int, dump: Path | None) -> Made:
    trained, life = run.history.steps[step], run.history.life_of(step)
    batch = await _batch(run.store, config, trained, run.ended[step])
    prepared = await nets.prepare(batch.groups)
    if dump is not None:
        await _dump(dump, nets, batch, prepared)
    stats = await nets.train_prepared(prepared, step=step, current_version=trained.weights, lags=batch.lags)
    differences = [f"line {number} of steps.jsonl is not as it was written" for number in run.history.altered]
    differences += _rows_that_differ(trained, batch) + _numbers_that_differ(
        run.metrics.get(step, {}), trained, batch, stats
    )
    if differences:
        differences += [
            f"{name} {version(name)} computes here, {made} did then"
            for name, made in life.software.items()
            if version(name) != made
        ]
    return Made(step, len(batch.groups), batch.sessions, len(prepared.rows), stats, tuple(differences))


async def _ended(store: Store, trained: Trained) -> Sequence[EndedGroup]:
    """The groups of a step. Raises ConfigError where what they recorded is not there any more."""
    found = await store.reading.consumed(trained.made)
    if not found:
        raise ConfigError(
            f"the store has no group that step {trained.step} (version {trained.made.label}) trained: it is another run's"
        )
    for group in found:
        for session in group.sessions:
            gone = session.deleted_at is not None
            if gone or (session.interaction_count and not await store.sessions.interactions(session.id)):
                raise ConfigError(
                    f"step {trained.step} cannot be made again: the content of session {session.id!r} was deleted, only its sums are "
                    "left; steps that begin with a later recovery state may still be"
                )
    return found


async def _batch(store: Store, config: RunConfig, trained: Trained, ended: Sequence[EndedGroup]) -> Batch:
    """What the batcher made of the same sessions under the same weights."""
    from areal.assemble import limits_of, recipe_of, stale_policy

    gate = StalenessGate(
        store.training, limits_of(config), Version(trained.weights, trained.step, trained.made.incarnation)
    )
    recipe = recipe_of(config)
    whole = [await read_group(store, group, recipe) for group in ended]
    labels = {int(label) for one in whole for row in one.group.trajectories for label in np.unique(row.versions)}
    await gate.learn(labels)
    checked = [checked_ages(one, gate, stale_policy(config)) for one in whole]
    return batch_of([one for one in checked if one.group is not None], gate, reward_clip=recipe.reward_clip)


def _rows_that_differ(trained: Trained, batch: Batch) -> list[str]:
    """The sessions and their rows, beside what was written down when they were trained."""
    found, digests = [], session_digests(batch.groups)
    now = {
        group: {session: digests.get(session, "") for session in members} for group, members in batch.members.items()
    }
    for group in dict.fromkeys([*trained.groups, *now]):
        then, there = trained.groups.get(group, {}), now.get(group, {})
        for session in dict.fromkeys([*then, *there]):
            if session not in there:
                found.append(
                    f"session {session!r} of group {group} was trained and is not in the store's groups of this step"
                )
            elif session not in then:
                found.append(
                    f"session {session!r} of group {group} is in the store's groups of this step and was not trained"
                )
            elif then[session] != there[session]:
                found.append(f"session {session!r} of group {group} makes other rows than those that were trained")
    if list(trained.groups) != [group.id for group in batch.groups] and not found:
        found.append(f"the groups come in another order: {batch.group_ids}, not {list(trained.groups)}")
    if dict(trained.lags) != batch.lags:
        found.append(f"the weights of its tokens are {batch.lags} steps behind by label, {dict(trained.lags)} then")
    return found


def _numbers_that_differ(
    logged: Mapping[str, float], trained: Trained, batch: Batch, stats: Mapping[str, float]
) -> list[str]:
    """Bit for bit: metrics.jsonl has every digit of a number."""
    if logged.get("train/version") != trained.made.label:
        return [f"metrics.jsonl has no numbers of this step as version {trained.made.label}"]
    own = {"reward": batch.reward, "lag_mean": batch.lag_mean, "lag_max": batch.lag_max, "sessions": batch.sessions}
    numbers = own | {name: value for name, value in stats.items() if name not in CLOCKS}
    return [
        f"{name} is {value!r}, {logged[f'train/{name}']!r} then"
        for name, value in numbers.items()
        if f"train/{name}" in logged and not _same(float(value), logged[f"train/{name}"])
    ]


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


async def _dump(path: Path, nets: Nets, batch: Batch, prepared: Prepared) -> None:
    """One JSON object per row, as the policy's net takes it, with its log-probs under the weights of the step's start."""
    from areal.engine.rows import decode_row

    groups = {row.session_id: group for group in batch.groups for row in group.trajectories}
    scored = await nets.policy.score(prepared.rows)
    path.touch(0o600)  # it holds what users said
    with path.open("w", encoding="utf-8") as file:
        for row, logprobs in zip(prepared.rows, scored, strict=True):
            arrays, group = decode_row(row), groups[row.session_id]
            named = {name: getattr(arrays, name) for name in ("reference", "teacher")}
            columns: dict[str, Any] = {
                "token_ids": arrays.ids,
                "trained": arrays.trained,
                "logprobs": arrays.logprobs,
                "logprobs_at_start": logprobs,
                "versions": arrays.versions,
                "temperatures": arrays.temperatures,
                "advantages": arrays.advantages,
            } | {name: values for name, values in named.items() if values is not None}
            facts = {"group": group.id, "task_id": group.task_id, "session_id": row.session_id}
            file.write(json.dumps(facts | {name: values.tolist() for name, values in columns.items()}) + "\n")


def _words(origin: Origin, step: int) -> str:
    where = f"recovery state {origin.path.name}" if origin.restored else f"the model {origin.path}"
    between = step - origin.step
    return f"from {where}" + (f", with the {between} steps before it" if between else "")


async def _show(folder: Path, step: int, dump: Path | None) -> int:
    code = 0
    async for each in replay(folder, step, dump):
        if isinstance(each, Origin):
            print(f"step {step}: {_words(each, step)}", flush=True)
            continue
        code = 1 if each.differences else code
        how = "DIFFERS" if each.differences else "bit-equal"
        numbers = f"loss={each.stats['loss']!r} grad_norm={each.stats['grad_norm']!r}"
        size = f"{each.groups} groups, {each.sessions} sessions, {each.rows} rows"
        print(f"step {each.step}: {how}: {size}, {numbers}", flush=True)
        for difference in each.differences:
            print(f"  {difference}", flush=True)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """`areal replay`. See the module for the exit codes."""
    parser = argparse.ArgumentParser(
        prog="areal replay",
        description="Make a training step of a run again and compare batch, loss and stats with what was recorded.",
        epilog="Exit codes: 0 bit-equal, 1 something differs or a process failed, 2 it cannot be made again.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run folder")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step as the log numbers it")
    parser.add_argument(
        "--dump", type=Path, metavar="FILE", help="write the rows of the step there, a JSON object per line"
    )
    options = parser.parse_args(argv)
    try:
        return asyncio.run(_show(options.run.absolute(), options.step, options.dump))
    except ArealError as error:
        print(f"error: {redact(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
