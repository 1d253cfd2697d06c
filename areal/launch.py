"""The processes of one run: which, with which settings, in which order.

    launch = Launch(config, folder, scheduler, gate, model_dir, run_id, store_url)
    servers, ranks = await launch.servers_and_ranks(stack)              # url -> Backend, net -> client; they load side by side
    workers, gateway_url = await launch.front(stack)                    # then what clients reach

A gateway that already runs on the configured port is attached to; else the run starts its own. Everything that `auto` and 0
leave open in the config is decided here. Used by assemble.py and doctor.py.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from areal.base.atomic import write_atomic
from areal.base.logs import announce, warn
from areal.chat import load_renderer
from areal.chat.scripted import in_tokens_of
from areal.cluster.kept import KeptProcess
from areal.cluster.run_folder import RunFolder
from areal.cluster.scheduler import Job, Process, Scheduler
from areal.config.algorithms import kl_off_the_reward, resolved
from areal.config.backend_spec import parse_backend
from areal.config.engine import ActorConfig, CriticConfig, ModelConfig, TeacherConfig
from areal.config.own_agents import runs_agents
from areal.config.run import RunConfig
from areal.engine.client import EngineClient
from areal.engine.parallel.dims import check_layout
from areal.engine.place import rank_jobs
from areal.engine.settings import EngineSettings
from areal.gateway.attach import attach, detach, find
from areal.gateway.server import DEFAULT_PORT
from areal.gateway.state import RunFacts
from areal.gateway.watch import watched
from areal.inference import connect
from areal.inference.backend import Backend
from areal.models.fetch import resolve, same_vocabulary
from areal.rollout.staleness import StalenessGate
from areal.web.address import is_loopback
from areal.web.client import JsonClient

# A swap frees and makes hundreds of MB at a time. glibc would keep them in the heaps of whichever threads they passed
# through; as mappings of their own they go back to the system at once. Other C libraries ignore these names.
_GIVE_MEMORY_BACK = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": str(2**20)}


MEETING_SHARE = 0.9
"""Of the time that processes have to start: by then the ranks of a net have met and loaded, or say themselves who has not."""

RANK_NAMES = {"policy": "rank", "reference": "reference", "teacher": "teacher", "critic": "critic"}
"""Of a net's processes, before their number."""


def trains(config: RunConfig) -> bool:
    """Whether there is a model to train. Without one (scripted backend, no actor.path) sessions are only recorded."""
    return bool(config.actor.path)


def threads_of(configured: int, config: RunConfig, *, processes: int = 1) -> int:
    """Of each of so many processes that compute at once. 0: an asynchronous run shares the cores between sampling and training, a
    synchronous one alternates."""
    cores = os.cpu_count() or 1
    whole = cores if config.rollout.max_head_offpolicyness == 0 else math.ceil(cores / 2)
    return configured or max(1, whole // processes)


def is_base(ref: ModelConfig, folder: Path, actor: ActorConfig, model_dir: Path | None) -> bool:
    """Whether the policy without its adapter says what this reference in `folder` would: no process of its own is needed then."""
    layout = ref.model_fields_set & {"backend", "replicas"}
    elsewhere = any(getattr(ref, key) != getattr(actor, key) for key in layout)
    return actor.lora is not None and folder == model_dir and ref.dtype == actor.dtype and not elsewhere


def model_names(config: RunConfig) -> list[str]:
    """Names under which clients may ask for the policy; `default` first."""
    route = config.model_routing.policy_model if config.model_routing else None
    names = ["default", config.actor.path, "policy_model", *([route.model_id] if route else [])]
    return [name for name in dict.fromkeys(names) if name]


def channel_models(config: RunConfig) -> dict[str, str]:
    """The upstream models that this run asks by itself, by their role: whoever rewards, unless its client does."""
    source, routing = config.rollout.agent.reward_source, config.model_routing
    route = getattr(routing, source, None) if routing is not None else None
    return {} if route is None else {source: route.model_id}


def without_channel_key(config: RunConfig) -> RunConfig:
    """For workers: they need to know what the channel's models are called, and run agents' code; the gateway alone has its key."""
    if config.api_gateway is None:
        return config
    return config.model_copy(update={"api_gateway": config.api_gateway.model_copy(update={"api_key": "-"})})


def announce_gateway(url: str, config: RunConfig) -> None:
    """The line that people and scripts wait for, and what those should know whose agents come by themselves."""
    agent = config.rollout.agent
    announce("RLTrainer", f"Proxy gateway available at {url}")
    if is_loopback(urlsplit(url).hostname or ""):
        announce(
            "RLTrainer", "it listens on loopback only; rollout.agent.gateway_host=0.0.0.0 and an admin key open it"
        )
    if runs_agents(config):
        return
    announce("RLTrainer", f"waiting for agents at {url}/v1")
    if agent.internal_token is not None:
        announce(
            "RLTrainer",
            f"a session that opens under the internal token ends with its call {agent.max_turns} (rollout.agent.max_turns) or when idle for "
            f"{agent.session_timeout_seconds:g} s (rollout.agent.session_timeout_seconds), and holds a slot until then; lower these for "
            "shorter conversations, or end them with /rl/end_session",
        )


def loopback_past_proxies() -> dict[str, str]:
    """For agents that we start: their HTTP clients read the proxy variables, and their own gateway is on loopback."""
    listed = os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or ""
    names = ",".join(filter(None, [listed, "127.0.0.1", "localhost", "::1"]))
    return {"NO_PROXY": names, "no_proxy": names}


def on_port_of(url: str, job: Job) -> Job:
    """The same job where it was before: whoever knows its URL finds it again."""
    return replace(job, spec={**job.spec, "port": urlsplit(url).port})


class Launch:
    """Starts the processes of one run and connects to them."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        scheduler: Scheduler,
        gate: StalenessGate,
        model_dir: Path | None,
        run_id: str,
        store_url: str,
        adapter_dir: Path | None = None,
    ) -> None:
        """adapter_dir: of the adapter that the policy goes on with, beside the model."""
        self.config = config
        self.folder = folder
        self.scheduler = scheduler
        self.gate = gate
        self.model_dir = model_dir
        self.adapter_dir = adapter_dir
        self.token = scheduler.run_token
        self.channel_token = (
            f"sk-channel-{secrets.token_urlsafe(32)}"  # opens the upstream models at the gateway, for this run itself
        )
        self.store_url = store_url
        self.run_id = run_id
        self.servers: dict[str, Backend] = {}
        self.kept: list[KeptProcess] = []  # of the servers, in their order
        self.nets: dict[str, dict[str, Any]] = {}  # the settings of each net's ranks

    async def servers_and_ranks(self, stack: AsyncExitStack) -> tuple[dict[str, Backend], dict[str, EngineClient]]:
        """Inference servers by URL and ranks by the net they hold (the names of engine/nets.py), started side by side; no rank
        where nothing is trained. A net of several ranks is reached through its leader."""
        self.nets = await self._nets() if trains(self.config) else {}
        within_s = MEETING_SHARE * self.config.scheduler.startup_timeout_seconds
        jobs = {
            net: rank_jobs(RANK_NAMES[net], settings, self.scheduler, self.folder.processes, within_s=within_s)
            for net, settings in self.nets.items()
        }
        ready = await self._start_servers(stack, [job for each in jobs.values() for job in each])
        leaders = {net: ready[sum(map(len, list(jobs.values())[:number]))] for number, net in enumerate(jobs)}
        ranks = {
            net: await stack.enter_async_context(
                EngineClient(facts["url"], self.token, within_s=self.config.actor.step_timeout_seconds)
            )
            for net, facts in leaders.items()
        }
        return self.servers, ranks

    async def servers_alone(self, stack: AsyncExitStack) -> None:
        """Inference servers where nothing is to be trained although there is a model."""
        await self._start_servers(stack, [])

    async def _start_servers(self, stack: AsyncExitStack, beside: list[Job]) -> list[dict[str, Any]]:
        """Start and connect to them; what the jobs beside them reported."""
        spec = parse_backend(self.config.rollout.backend)
        jobs = [Job(f"server-{k}", *self._server_job(spec.name), env=_GIVE_MEMORY_BACK) for k in range(spec.size)]
        processes = await self.scheduler.start(*jobs, *beside)
        ready = await self._ready(processes)
        load_s, startup_s = self.config.weights.load_timeout_seconds, self.config.scheduler.startup_timeout_seconds
        urls = [str(facts["url"]) for facts in ready[: spec.size]]
        self.kept = [
            KeptProcess(self.scheduler, on_port_of(url, job), process, startup_s=startup_s)
            for url, job, process in zip(urls, jobs, processes, strict=False)
        ]
        self.servers = {url: connect(spec.name, url, self.token, load_s=load_s) for url in urls}
        for backend in self.servers.values():
            stack.push_async_callback(backend.close)
        return ready[spec.size :]

    async def _nets(self) -> dict[str, dict[str, Any]]:
        """Settings of the policy's ranks, and of those of the nets that the configuration gives it."""
        config, actor = self.config, resolved(self.config)
        nets = {"policy": self._settings(actor, str(self.model_dir), **self._objective())}
        for net, section in (("reference", config.ref), ("teacher", config.teacher), ("critic", config.critic)):
            if section is None:
                continue
            folder = await asyncio.to_thread(resolve, section.path or config.actor.path)
            if net == "reference" and is_base(section, folder, actor, self.model_dir):
                nets["policy"]["is_reference"] = True
                continue
            same_vocabulary(folder, Path(str(self.model_dir)), net)
            own: dict[str, Any] = {"role": "frozen", "lora": None}
            own |= {key: getattr(section, key) for key in ("dtype", "backend", "replicas")}
            if isinstance(section, CriticConfig):
                own |= {"role": "critic", "optimizer": section.optimizer, "eps_clip": section.eps_clip}
                own |= {"loss_aggregation": "token_mean"}
            nets[net] = self._settings(actor, str(folder), **own)
        if actor.offload != "none":
            warn(
                "RLTrainer",
                f"actor.offload={actor.offload}: the ranks of this run compute on the CPU, where it saves nothing and costs a copy; take it out",
            )
        return nets

    def _settings(self, actor: ActorConfig, model_dir: str, **own: Any) -> dict[str, Any]:
        size = parse_backend(own.get("backend", actor.backend)).size
        common: dict[str, Any] = {
            "model_dir": model_dir,
            "threads": threads_of(actor.threads, self.config, processes=size),
            "total_steps": self.config.total_train_steps,
            "seed": self.config.seed,
            "deterministic": self.config.rollout.native.deterministic,
            "transfer": self.config.weights.transfer,
            "kl_ctl": 0.0,
        }
        settings = EngineSettings.of(actor, **(common | own))
        check_layout(settings)
        return settings.spec()

    def _objective(self) -> dict[str, Any]:
        """What the policy's loss takes from other sections."""
        config, teacher = self.config, self.config.teacher or TeacherConfig()
        return {
            "fixed_length": config.gconfig.max_new_tokens or 0,
            "kl_ctl": 0.0 if kl_off_the_reward(config) else config.actor.kl_ctl,
            "rl_loss_weight": teacher.rl_loss_weight,
            "distill_loss_weight": teacher.distill_loss_weight,
        }

    async def front(
        self, stack: AsyncExitStack, *, attach: bool = True, was_at: str = ""
    ) -> tuple[list[JsonClient], str]:
        """Rollout workers, then the gateway that leads to them. attach: look first whether one runs already. was_at: the URL that clients
        know already."""
        config, servers = self.config, list(self.servers)
        common = {
            "store_url": self.store_url,
            "signing_key_path": str(self.folder.signing_key),
            "config": without_channel_key(config).model_dump(mode="json"),
        }
        jobs = [
            Job(
                f"worker-{k}",
                "areal.rollout.worker",
                common
                | {
                    "worker_id": f"w{k}",
                    "model_dir": str(self.model_dir or ""),
                    "servers": [servers[(k + j) % len(servers)] for j in range(len(servers))],
                    "policy_names": model_names(config),
                },
                env=loopback_past_proxies(),
            )
            for k in range(config.rollout.workers)
        ]
        ready = await self._ready(await self.scheduler.start(*jobs))
        workers = [await stack.enter_async_context(JsonClient(facts["url"], bearer=self.token)) for facts in ready]
        attached = await self._attached_gateway(stack) if attach else None
        return workers, attached or await self._own_gateway(was_at)

    async def _attached_gateway(self, stack: AsyncExitStack) -> str | None:
        """The URL of a gateway that was started before us and now serves this run; None if there is none."""
        agent = self.config.rollout.agent
        ports = [agent.gateway_port] if agent.gateway_port else []
        if agent.framework or agent.internal_token or self.config.api_gateway:
            ports.append(DEFAULT_PORT)  # where `areal gateway` listens if nobody says otherwise
        handle = await find([f"http://localhost:{port}" for port in ports], say=lambda text: warn("RLTrainer", text))
        if handle is None:
            return None
        facts = RunFacts(
            run_id=self.run_id,
            pid=os.getpid(),
            store_url=self.store_url,
            signing_key_path=str(self.folder.signing_key),
            admin_api_key=agent.admin_api_key,
            model_names=tuple(model_names(self.config)),
            internal_token=agent.internal_token,
            channel_token=self.channel_token,
            channel_models=channel_models(self.config),
        )
        await attach(handle, facts)
        stack.push_async_callback(detach, handle, facts)
        await stack.enter_async_context(watched(handle, say=lambda text: warn("RLTrainer", text)))
        return handle.url

    async def _own_gateway(self, was_at: str) -> str:
        job = Job("gateway", "areal.gateway.server", self._gateway_spec())
        [gateway] = await self._ready(await self.scheduler.start(on_port_of(was_at, job) if was_at else job))
        return str(gateway["url"])

    async def _ready(self, processes: list[Process]) -> list[dict[str, Any]]:
        timeout = self.config.scheduler.startup_timeout_seconds
        return list(await asyncio.gather(*(process.ready(timeout) for process in processes)))

    def _server_job(self, name: str) -> tuple[str, dict[str, Any]]:
        if name == "scripted":
            return "areal.inference.scripted.server", {"path": str(self._script())}
        native = self.config.rollout.native
        return "areal.inference.native.server", native.model_dump(mode="json") | {
            "model_dir": str(self.model_dir),
            "threads": threads_of(native.threads, self.config),
            "version": self.gate.current.label,
            "adapter": str(self.adapter_dir or ""),
            "adapter_dtype": self.config.actor.dtype,
        }

    def _script(self) -> Path:
        """The script that is played; with a model, its texts in the model's own tokens."""
        path = Path(self.config.rollout.scripted.path).absolute()
        if self.model_dir is None:
            return path
        translated = self.folder.root / "script.jsonl"
        renderer = load_renderer(self.model_dir, chat_template=self.config.rollout.agent.chat_template)
        write_atomic(translated, in_tokens_of(renderer, path).encode())
        return translated

    def _gateway_spec(self) -> dict[str, Any]:
        agent, channel = self.config.rollout.agent, self.config.model_dump(include={"api_gateway", "model_routing"})
        return {
            "host": agent.gateway_host or ("127.0.0.1" if self.config.scheduler.type == "local" else "0.0.0.0"),
            "port": agent.gateway_port,
            "log_dir": str(self.folder.logs),
            "store_url": self.store_url,
            "signing_key_path": str(self.folder.signing_key),
            "admin_api_key": agent.admin_api_key,
            "internal_token": agent.internal_token,
            "run_id": self.run_id,
            "model_names": model_names(self.config),
            "max_body_bytes": agent.max_body_bytes,
            "channel_token": self.channel_token,
            "channel_models": channel_models(self.config),
            **channel,
        }
