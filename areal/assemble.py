"""Config -> parts. The only file that knows them all; what needs a decision from several sections is decided here.

    async with assemble(config, folder, run_id) as run:     # every process is up and watched; all are stopped at the end
        await train(run)

launch.py starts the processes. Order of start: store and version row, inference servers and rank (they load weights side by side), workers, gateway. A resumed
run starts its servers from the checkpoint too, under a label of its own.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from areal import __version__
from areal.algorithms import ALGORITHMS
from areal.algorithms.reward_shaping import Shaping
from areal.base.atomic import write_atomic
from areal.base.logs import announce
from areal.base.metrics import MetricsFile
from areal.base.types import Limits
from areal.cluster import start_scheduler
from areal.cluster.run_folder import RunFolder
from areal.cluster.scheduler import Scheduler
from areal.config.algorithms import kl_off_the_reward, resolved
from areal.config.backend_spec import parse_backend
from areal.config.own_agents import runs_agents
from areal.config.recorded import Recorded
from areal.config.run import RecoverConfig, RunConfig, SaverConfig
from areal.config.show import masked_yaml, secretless_tree
from areal.engine.client import EngineClient
from areal.engine.credit import Credit
from areal.engine.nets import Nets
from areal.inference.backend import Backend
from areal.launch import Launch, announce_gateway, threads_of
from areal.rollout import metrics as _declared  # noqa: F401  declares the names written by train.py
from areal.rollout.advisor import SpeedAdvisor
from areal.rollout.batch import Recipe
from areal.rollout.batcher import Batcher
from areal.rollout.datasets import Task, comes_from, endless
from areal.rollout.dispatcher import Dispatcher
from areal.rollout.evaluation import Evaluation
from areal.rollout.history import History, Life
from areal.rollout.pace import Pace
from areal.rollout.queue import GroupQueue
from areal.rollout.recovery import Start, check_store, take_up
from areal.rollout.retention import Upholder, retention_of
from areal.rollout.rewards.opening import scoring
from areal.rollout.rewards.scorer import Scorer
from areal.rollout.snapshots import Purpose, Schedule, Snapshots
from areal.rollout.staleness import StalenessGate
from areal.rollout.task_files import read_tasks
from areal.rollout.weights import WeightPublisher
from areal.store import RUN_PATIENCE_S, open_store
from areal.store.base import Given, Store
from areal.store.location import choose_store
from areal.tools.progress import Progress
from areal.web.client import JsonClient


@dataclass(frozen=True, slots=True)
class Learner:
    """What turns batches into new weights."""

    nets: Nets
    publisher: WeightPublisher
    snapshots: Snapshots


@dataclass(slots=True)
class Run:
    """A running system, as the loop sees it. learner None: sessions are recorded, nothing is trained."""

    config: RunConfig
    folder: RunFolder
    scheduler: Scheduler
    store: Store
    gate: StalenessGate
    batcher: Batcher
    learner: Learner | None
    evaluation: Evaluation
    dispatcher: Dispatcher
    scorer: Scorer | None  # where the run rewards by itself
    metrics: MetricsFile
    history: History
    progress: Progress
    advisor: SpeedAdvisor
    pace: Pace
    first_step: int
    gateway_url: str
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    async def unless_stopped(self, work: Any) -> Any:
        """The result of awaiting `work`, or None once somebody asked the run to stop; a dispatcher or a publisher that fails raises."""
        task = asyncio.ensure_future(work)
        publisher = self.learner.publisher if self.learner is not None else None
        failed = [asyncio.create_task(each.failure()) for each in (self.dispatcher, publisher) if each is not None]
        others = [*failed, asyncio.create_task(self.stopping.wait())]
        try:
            await asyncio.wait({task, *others}, return_when=asyncio.FIRST_COMPLETED)
            for one in failed:
                if one.done():
                    one.result()
            return task.result() if task.done() else None
        finally:
            for each in (task, *others):
                each.cancel()


@asynccontextmanager
async def assemble(
    config: RunConfig, folder: RunFolder, run_id: str, *, gateway_was_at: str = ""
) -> AsyncIterator[Run]:
    """Start everything; stop everything at the end, also on failure. The folder has been made. gateway_was_at: the URL that this run's clients
    know, where it has been up before."""
    incarnation = secrets.token_hex(4)
    async with AsyncExitStack() as stack:
        (folder.logs / "gateway.log").touch(mode=0o600)
        scheduler = await stack.enter_async_context(start_scheduler(config, folder))
        tasks, held_out = _tasks(config.train_dataset.path), _tasks(config.evaluator.path)
        start = await asyncio.to_thread(take_up, config, folder)
        _say_what_changed(config, folder.root / "config.yaml")
        write_atomic(folder.root / "config.yaml", masked_yaml(config).encode())
        progress = stack.enter_context(
            Progress(
                total_steps=config.total_train_steps,
                first_step=start.step,
                title=f"{config.experiment_name}/{config.trial_name}",
                enabled=sys.stdout.isatty(),
            )
        )
        metrics = stack.enter_context(MetricsFile(folder.metrics_path, run_id, start.step))
        store_url = choose_store(folder.root, config.store.url, run_id)
        store = await stack.enter_async_context(await open_store(store_url, patience_s=RUN_PATIENCE_S))
        given = await _take_up(config, tasks, store, start, incarnation)
        await stack.enter_async_context(Upholder(store.upkeep, retention_of(config), folder.checkpoints))
        gate = await StalenessGate.open(
            store.training, limits_of(config), incarnation=incarnation, first_step=start.step
        )
        launch = Launch(config, folder, scheduler, gate, start.model_dir, run_id, store_url, start.adapter_dir)
        announce("RLTrainer", f"starting the processes of this run; their logs are in {folder.logs}")
        servers, ranks = await launch.servers_and_ranks(stack)
        nets = nets_of(config, launch.nets, ranks) if ranks else None
        if nets is not None and start.found is not None:
            await nets.restore(str(start.found.path))
        workers, gateway_url = await launch.front(stack, was_at=gateway_was_at)
        announce_gateway(gateway_url, config)
        trained = (await store.training.counts()).consumed
        scorer, dispatcher = await _agents(stack, launch, store, workers, gateway_url, tasks, held_out, given)
        yield Run(
            config=config,
            folder=folder,
            scheduler=scheduler,
            store=store,
            gate=gate,
            batcher=_batcher(config, gate, store),
            learner=await _learner(
                stack, launch, start, nets, servers, workers, metrics, trained=trained, tasks=len(tasks)
            ),
            evaluation=Evaluation(held_out, dispatcher, freq_steps=config.evaluator.freq_steps, scorer=scorer),
            dispatcher=dispatcher,
            scorer=scorer,
            metrics=metrics,
            history=stack.enter_context(_history(launch, start, incarnation)),
            progress=progress,
            advisor=_advisor(config, store, gate, metrics),
            pace=Pace(config.stats_logger.log_interval, time.monotonic()),
            first_step=start.step,
            gateway_url=gateway_url,
        )


def _tasks(path: str | None) -> list[Task]:
    return read_tasks(path) if path else []


def _say_what_changed(config: RunConfig, path: Path) -> None:
    """Beside what the run did before, a curve that bends needs a reason. path: of the former start's configuration, if there was one."""
    if changes := Recorded.of(path).changes(config):
        announce("RLTrainer", f"settings that are others than at the last start: {'; '.join(changes)}")


def _history(launch: Launch, start: Start, incarnation: str) -> History:
    life = Life(
        incarnation=incarnation,
        first_step=start.step,
        started_from=start.found.path.name if start.found else "",
        config=secretless_tree(launch.config),
        ranks=launch.nets,
        software={name: version(name) for name in ("torch", "numpy")} | {"areal": __version__},
    )
    return History.open(launch.folder.steps, life)


async def _take_up(
    config: RunConfig, tasks: Sequence[Task], store: Store, start: Start, incarnation: str
) -> dict[str, Given]:
    """What an earlier life of this run left in the store: steps that are lost are trained again, agents that died with it end. Returns
    the tasks that were given out."""
    given: dict[str, Given] = {}
    await check_store(start, store.training)
    freed = await store.training.release_after(start.step, incarnation)
    if runs_agents(config):
        given = await store.training.interrupt(comes_from(tasks))
        await store.sessions.expire(time.time(), [])
    if start.found:
        announce("RLTrainer", f"resumed from {start.found.path}: step {start.step}, {freed} groups to be trained again")
    return given


async def _learner(
    stack: AsyncExitStack,
    launch: Launch,
    start: Start,
    nets: Nets | None,
    servers: dict[str, Backend],
    workers: list[JsonClient],
    metrics: MetricsFile,
    *,
    trained: int,
    tasks: int,
) -> Learner | None:
    if nets is None:
        return None
    config = launch.config
    publisher = WeightPublisher(
        nets.policy,
        servers,
        workers,
        launch.gate,
        kept=launch.kept,
        quorum=config.weights.quorum,
        timeout_s=config.weights.load_timeout_seconds,
    )
    snapshots = Snapshots(
        launch.folder.checkpoints,
        nets,
        _schedules(config, tasks),
        keep=config.saver.keep,
        origin=start.origin,
        found=start.found,
        trained=trained,
        metrics=metrics,
    )
    return Learner(
        nets=nets,
        publisher=await stack.enter_async_context(publisher),
        snapshots=await stack.enter_async_context(snapshots),
    )


def _schedules(config: RunConfig, tasks: int) -> dict[Purpose, Schedule]:
    """When models and recovery states are due. tasks: in an epoch, which is as many groups."""
    sections: dict[Purpose, SaverConfig | RecoverConfig] = {"saver": config.saver, "recover": config.recover}
    return {
        purpose: Schedule(section.freq_steps, section.freq_epochs, section.freq_secs, tasks)
        for purpose, section in sections.items()
    }


def credit_of(config: RunConfig) -> Credit:
    """How this configuration makes advantages of rewards."""
    actor = resolved(config)
    shaping = Shaping(
        scaling=actor.reward_scaling,
        bias=actor.reward_bias,
        clip=actor.reward_clip,
        mask_truncated=actor.mask_no_eos_with_zero,
        overlong_tokens=actor.overlong_tokens,
        overlong_factor=actor.overlong_penalty_factor,
        overlong_limit=config.gconfig.max_new_tokens or 0,
    )
    return Credit(
        ALGORITHMS[actor.algorithm],
        shaping,
        discount=actor.discount or 0.0,
        gae_lambda=actor.gae_lambda or 0.0,
        kl_in_reward=actor.kl_ctl if kl_off_the_reward(config) else 0.0,
        kl_estimator=actor.kl_estimator or "k1",
    )


def nets_of(config: RunConfig, settings: Mapping[str, Mapping[str, Any]], ranks: Mapping[str, EngineClient]) -> Nets:
    """What trains, and what it asks. settings: of the ranks of each net, as launch.py made them."""
    others = {name: client for name, client in ranks.items() if name != "policy"}
    shared = bool(settings["policy"].get("is_reference"))
    return Nets(ranks["policy"], credit_of(config), policy_is_reference=shared, **others)


def recipe_of(config: RunConfig) -> Recipe:
    """How this configuration makes rows of sessions."""
    agent = config.rollout.agent
    return Recipe(agent.export_style, agent.turn_discount, agent.reward_clip)


def stale_policy(config: RunConfig) -> Literal["drop", "mask", "wait"]:
    """What becomes of tokens that are too old (settled 19)."""
    policy = config.rollout.stale_tokens
    return policy if policy != "auto" else "drop" if runs_agents(config) else "mask"


def _batcher(config: RunConfig, gate: StalenessGate, store: Store) -> Batcher:
    return Batcher(
        GroupQueue(store, recipe_of(config)),
        gate,
        store.training,
        batch_groups=config.train_dataset.batch_size,
        most_groups=config.train_dataset.max_batch_size,
        informative=credit_of(config).informative if resolved(config).dynamic_sampling else None,
        stale=stale_policy(config),
        wait_s=config.rollout.stale_wait_seconds,
        say=lambda text: announce("RLTrainer", text),
    )


async def _agents(
    stack: AsyncExitStack,
    launch: Launch,
    store: Store,
    workers: list[JsonClient],
    gateway_url: str,
    tasks: Sequence[Task],
    held_out: Sequence[Task],
    given: Mapping[str, Given],
) -> tuple[Scorer | None, Dispatcher]:
    """Who rewards what agents did, and who starts them, where this run does either."""
    config, gate, token = launch.config, launch.gate, launch.channel_token
    known = [*tasks, *held_out]
    scorer = await stack.enter_async_context(
        scoring(config, store, gate, known, gateway_url=gateway_url, channel_token=token, logs=launch.folder.logs)
    )
    feed = None
    if runs_agents(config):
        feed = endless(tasks, seed=config.seed, shuffle=config.train_dataset.shuffle, given=given)
    dispatcher = Dispatcher(
        workers,
        gate,
        store.training,
        n_samples=config.gconfig.n_samples,
        tasks=feed,
        unscored=scorer.groups if scorer is not None else None,
    )
    return scorer, await stack.enter_async_context(dispatcher)


def _advisor(config: RunConfig, store: Store, gate: StalenessGate, metrics: MetricsFile) -> SpeedAdvisor:
    """A synchronous run takes turns on the whole machine; an asynchronous one is split as its threads are."""
    servers, ranks = (parse_backend(each).size for each in (config.rollout.backend, config.actor.backend))
    sampling = servers * threads_of(config.rollout.native.threads, config)
    learning = ranks * threads_of(config.actor.threads, config, processes=ranks)
    shares = (sampling / (sampling + learning), learning / (sampling + learning))
    generating, training = (1.0, 1.0) if config.rollout.max_head_offpolicyness == 0 else shares
    return SpeedAdvisor(store.reading, gate, metrics, generating=generating, training=training)


def limits_of(config: RunConfig) -> Limits:
    """What admission works with."""
    return Limits(
        max_concurrent=config.rollout.max_concurrent_rollouts,
        max_lag=config.rollout.max_head_offpolicyness,
        batch_groups=config.train_dataset.batch_size,
        n_samples=config.gconfig.n_samples,
        queue_size=config.rollout.queue_size or 0,
        group_timeout_s=config.rollout.group_timeout_seconds,
        scored=config.rollout.agent.reward_source != "client",
    )
