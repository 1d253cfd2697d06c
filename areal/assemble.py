"""Config -> parts. The only file that knows them all; what needs a decision from several sections is decided here.

    check(config)                                   # ConfigError before anything starts (also under --dry-run)
    async with assemble(config, folder) as run:     # every process is up and watched; all are stopped at the end
        await train(run)

Order of start: store and version row, inference servers and rank (they load weights side by side), workers, gateway. A resumed
run starts its servers from the checkpoint too, under a label of its own.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from areal.algorithms import ALGORITHMS
from areal.algorithms.base import Algorithm
from areal.base.atomic import write_atomic
from areal.base.errors import ConfigError
from areal.base.logs import announce, open_log
from areal.base.metrics import MetricsFile
from areal.base.types import Limits
from areal.cluster import start_scheduler
from areal.cluster.run_folder import RunFolder
from areal.cluster.scheduler import Job, Process, Scheduler
from areal.config.backend_spec import parse_backend
from areal.config.run import RunConfig
from areal.config.show import masked_yaml
from areal.config.supported import refuse_unsupported
from areal.engine.client import EngineClient
from areal.engine.settings import EngineSettings
from areal.inference import connect
from areal.inference.backend import Backend
from areal.models.fetch import resolve
from areal.rollout import metrics as _declared  # noqa: F401  declares the names written by train.py
from areal.rollout.batcher import Batcher
from areal.rollout.datasets import endless, read_tasks
from areal.rollout.dispatcher import Dispatcher
from areal.rollout.evaluation import Evaluation
from areal.rollout.queue import GroupQueue
from areal.rollout.snapshots import Snapshot, Snapshots, latest
from areal.rollout.staleness import StalenessGate
from areal.rollout.weights import WeightPublisher
from areal.store import open_store
from areal.store.base import Store
from areal.tools.progress import Progress
from areal.web.address import is_loopback
from areal.web.client import JsonClient


class Pace:
    """Seconds between the ends of two steps; the first counts from the start."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def step(self, now: float) -> float:
        seconds, self._last = max(now - self._last, 1e-9), now
        return seconds


@dataclass(slots=True)
class Run:
    """A running system, as the loop sees it."""

    config: RunConfig
    folder: RunFolder
    scheduler: Scheduler
    store: Store
    gate: StalenessGate
    batcher: Batcher
    engine: EngineClient
    algorithm: Algorithm
    publisher: WeightPublisher
    snapshots: Snapshots
    evaluation: Evaluation
    dispatcher: Dispatcher
    metrics: MetricsFile
    progress: Progress
    first_step: int
    gateway_url: str
    pace: Pace = field(default_factory=Pace)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def metrics_path(self) -> Path:
        return self.folder.logs / "metrics.jsonl"

    async def unless_stopped(self, work: Any) -> Any:
        """The result of awaiting `work`, or None once somebody asked the run to stop; a failing agent feeder raises."""
        task = asyncio.ensure_future(work)
        others = [asyncio.create_task(self.stopping.wait()), asyncio.create_task(self.dispatcher.failure())]
        try:
            await asyncio.wait({task, *others}, return_when=asyncio.FIRST_COMPLETED)
            if others[1].done():
                others[1].result()
            return task.result() if task.done() else None
        finally:
            for each in (task, *others):
                each.cancel()


def check(config: RunConfig) -> None:
    """Everything that can be known to be wrong before a process starts. Raises ConfigError with all reasons."""
    refuse_unsupported(config)
    if config.rollout.agent.mode == "inline" and not (config.rollout.agent.path and config.train_dataset.path):
        raise ConfigError(
            "rollout.agent.mode is inline but there is no agent or no tasks: set rollout.agent.path (module:attribute) and "
            "train_dataset.path (JSONL), or rollout.agent.mode=online to let agents come over HTTP"
        )
    if config.evaluator.path and not (config.evaluator.agent or config.rollout.agent.path):
        raise ConfigError("evaluator.path needs an agent to try its tasks: set evaluator.agent (module:attribute)")
    if not config.actor.path and parse_backend(config.rollout.backend).name != "scripted":
        raise ConfigError("actor.path is empty: name a model folder, a hub id, or a bundled model such as smollm2-135m")


@asynccontextmanager
async def assemble(config: RunConfig, folder: RunFolder) -> AsyncIterator[Run]:
    """Start everything; stop everything at the end, also on failure."""
    folder.create()
    incarnation = secrets.token_hex(4)
    run_id = f"{config.experiment_name}/{config.trial_name}/{incarnation}"
    async with AsyncExitStack() as stack:
        stack.enter_context(open_log(folder.logs / "train.log", run_id=run_id))
        (folder.logs / "gateway.log").touch(mode=0o600)
        scheduler = await stack.enter_async_context(start_scheduler(config, folder))
        found = _resumable(config, folder)
        first_step = found.step if found else 0
        write_atomic(folder.root / "config.yaml", masked_yaml(config).encode())
        progress = stack.enter_context(
            Progress(
                total_steps=config.total_train_steps,
                first_step=first_step,
                title=f"{config.experiment_name}/{config.trial_name}",
                enabled=sys.stdout.isatty(),
            )
        )
        metrics = stack.enter_context(MetricsFile(folder.logs / "metrics.jsonl", run_id))
        store = await stack.enter_async_context(await open_store(folder.store_url))
        if found:
            freed = await store.training.release_after(found.step, incarnation)
            announce("RLTrainer", f"resumed from {found.path}: step {found.step}, {freed} groups to be trained again")
        gate = await StalenessGate.open(
            store.training, limits_of(config), incarnation=incarnation, first_step=first_step
        )
        model_dir = found.path if found else await asyncio.to_thread(resolve, config.actor.path)
        launch = _Launch(config, folder, scheduler, gate, model_dir, run_id)
        backends, engine = await launch.servers_and_rank(stack, found)
        workers, gateway_url = await launch.front(stack)
        _announce_gateway(config, gateway_url)
        dispatcher = await stack.enter_async_context(_dispatcher(config, workers, gate, store))
        yield Run(
            config=config,
            folder=folder,
            scheduler=scheduler,
            store=store,
            gate=gate,
            batcher=_batcher(config, gate, store),
            engine=engine,
            algorithm=ALGORITHMS[algorithm_name(config)],
            publisher=WeightPublisher(engine, backends, gate),
            snapshots=Snapshots(folder.checkpoints, engine, freq_steps=config.saver.freq_steps, keep=config.saver.keep),
            evaluation=_evaluation(config, dispatcher),
            dispatcher=dispatcher,
            metrics=metrics,
            progress=progress,
            first_step=first_step,
            gateway_url=gateway_url,
        )


def _announce_gateway(config: RunConfig, url: str) -> None:
    announce("RLTrainer", f"Proxy gateway available at {url}")
    if is_loopback(urlsplit(url).hostname or ""):
        announce(
            "RLTrainer", "it listens on loopback only; rollout.agent.gateway_host=0.0.0.0 and an admin key open it"
        )


def _batcher(config: RunConfig, gate: StalenessGate, store: Store) -> Batcher:
    agent = config.rollout.agent
    policy = config.rollout.stale_tokens
    return Batcher(
        GroupQueue(store, export_style=agent.export_style, turn_discount=agent.turn_discount),
        gate,
        store.training,
        batch_groups=config.train_dataset.batch_size,
        stale=policy if policy != "auto" else "mask" if agent.mode == "online" else "drop",
        say=lambda text: announce("RLTrainer", text),
    )


def _dispatcher(config: RunConfig, workers: list[JsonClient], gate: StalenessGate, store: Store) -> Dispatcher:
    tasks = None
    if config.rollout.agent.mode == "inline" and config.train_dataset.path:
        own = read_tasks(config.train_dataset.path)
        tasks = endless(own, seed=config.seed, shuffle=config.train_dataset.shuffle)
    return Dispatcher(workers, gate, store.training, n_samples=config.gconfig.n_samples, tasks=tasks)


def _evaluation(config: RunConfig, dispatcher: Dispatcher) -> Evaluation:
    held_out = read_tasks(config.evaluator.path) if config.evaluator.path else []
    return Evaluation(held_out, dispatcher, freq_steps=config.evaluator.freq_steps)


def limits_of(config: RunConfig) -> Limits:
    """What admission works with."""
    return Limits(
        max_concurrent=config.rollout.max_concurrent_rollouts,
        max_lag=config.rollout.max_head_offpolicyness,
        batch_groups=config.train_dataset.batch_size,
        n_samples=config.gconfig.n_samples,
        queue_size=config.rollout.queue_size or 0,
        group_timeout_s=config.rollout.group_timeout_seconds,
    )


def algorithm_name(config: RunConfig) -> str:
    """auto: compare samples of one task with each other where there are several, else normalise over the batch."""
    if config.actor.algorithm != "auto":
        return config.actor.algorithm
    return "grpo" if config.gconfig.n_samples > 1 else "ppo"


def model_names(config: RunConfig) -> list[str]:
    """Names under which clients may ask for the policy; `default` first."""
    route = config.model_routing.policy_model if config.model_routing else None
    names = ["default", config.actor.path, "policy_model", *([route.model_id] if route else [])]
    return [name for name in dict.fromkeys(names) if name]


def threads_of(configured: int, config: RunConfig) -> int:
    """0: an asynchronous run shares the cores between sampling and training, a synchronous one alternates."""
    cores = os.cpu_count() or 1
    return configured or (cores if config.rollout.max_head_offpolicyness == 0 else max(1, math.ceil(cores / 2)))


def _resumable(config: RunConfig, folder: RunFolder) -> Snapshot | None:
    found = latest(folder.checkpoints)
    if found and config.recover.mode == "off":
        raise ConfigError(
            f"{folder.root} holds a run already and recover.mode is off: choose another trial_name, or recover.mode=auto"
        )
    return found


class _Launch:
    """Starts the processes of one run and connects to them."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        scheduler: Scheduler,
        gate: StalenessGate,
        model_dir: Path,
        run_id: str,
    ) -> None:
        self.config = config
        self.folder = folder
        self.scheduler = scheduler
        self.gate = gate
        self.model_dir = model_dir
        self.token = scheduler.run_token
        self.run_id = run_id
        self.server_urls: list[str] = []

    async def servers_and_rank(
        self, stack: AsyncExitStack, found: Snapshot | None
    ) -> tuple[list[Backend], EngineClient]:
        """Inference servers and the rank, started side by side."""
        spec = parse_backend(self.config.rollout.backend)
        jobs = [Job(f"server-{k}", *self._server_job(spec.name)) for k in range(spec.size)]
        settings = EngineSettings.of(
            self.config.actor,
            model_dir=str(self.model_dir),
            algorithm=algorithm_name(self.config),
            threads=threads_of(self.config.actor.threads, self.config),
            total_steps=self.config.total_train_steps,
            seed=self.config.seed,
            deterministic=self.config.rollout.native.deterministic,
            transfer=self.config.weights.transfer,
        )
        jobs.append(Job("rank-0", "areal.engine.worker", settings.spec()))
        *servers, rank = await self._ready(await self.scheduler.start(*jobs))
        self.server_urls = [facts["url"] for facts in servers]
        backends = [connect(spec.name, url, self.token) for url in self.server_urls]
        for backend in backends:
            stack.push_async_callback(backend.close)
        engine = await stack.enter_async_context(EngineClient(rank["url"], self.token))
        if found:
            await engine.restore(str(found.path))
        return backends, engine

    async def front(self, stack: AsyncExitStack) -> tuple[list[JsonClient], str]:
        """Rollout workers, then the gateway that leads to them."""
        config = self.config
        common = {
            "store_url": self.folder.store_url,
            "signing_key_path": str(self.folder.signing_key),
            "config": config.model_dump(mode="json"),
        }
        jobs = [
            Job(
                f"worker-{k}",
                "areal.rollout.worker",
                common
                | {
                    "worker_id": f"w{k}",
                    "model_dir": str(self.model_dir),
                    "servers": [self.server_urls[k % len(self.server_urls)]],
                    "policy_names": model_names(config),
                },
            )
            for k in range(config.rollout.workers)
        ]
        ready = await self._ready(await self.scheduler.start(*jobs))
        workers = [await stack.enter_async_context(JsonClient(facts["url"], bearer=self.token)) for facts in ready]
        [gateway] = await self._ready(
            await self.scheduler.start(Job("gateway", "areal.gateway.server", self._gateway_spec(common)))
        )
        return workers, gateway["url"]

    async def _ready(self, processes: list[Process]) -> list[dict[str, Any]]:
        timeout = self.config.scheduler.startup_timeout_seconds
        return list(await asyncio.gather(*(process.ready(timeout) for process in processes)))

    def _server_job(self, name: str) -> tuple[str, dict[str, Any]]:
        if name == "scripted":
            return "areal.inference.scripted.server", {"path": str(Path(self.config.rollout.scripted.path).absolute())}
        native = self.config.rollout.native
        return "areal.inference.native.server", native.model_dump(mode="json") | {
            "model_dir": str(self.model_dir),
            "threads": threads_of(native.threads, self.config),
            "version": self.gate.current.label,
        }

    def _gateway_spec(self, common: dict[str, Any]) -> dict[str, Any]:
        agent = self.config.rollout.agent
        return {
            "host": agent.gateway_host or ("127.0.0.1" if self.config.scheduler.type == "local" else "0.0.0.0"),
            "port": agent.gateway_port,
            "log_dir": str(self.folder.logs),
            "store_url": common["store_url"],
            "signing_key_path": common["signing_key_path"],
            "admin_api_key": agent.admin_api_key,
            "run_id": self.run_id,
            "model_names": model_names(self.config),
            "max_body_bytes": agent.max_body_bytes,
        }
