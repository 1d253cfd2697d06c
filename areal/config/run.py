"""The whole tree: what a YAML file and its overrides become (`RunConfig`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PrivateAttr

from areal.config.cluster import ClusterConfig, SchedulerConfig
from areal.config.engine import ActorConfig, CriticConfig, ModelConfig, TeacherConfig
from areal.config.rollout import GenerationConfig, RolloutConfig
from areal.config.section import Section
from areal.config.store import StoreConfig
from areal.config.upstream import ApiGatewayConfig, ModelRoutingConfig

RecoverMode = Literal["auto", "on", "off"]
TransferName = Literal["shared_memory", "disk", "delta"]


class DatasetConfig(Section):
    batch_size: int = Field(8, ge=1)
    """Groups per training step: as soon as so many are finished and fresh, a step starts. How many may be under way at once follows from it
    and from rollout.max_head_offpolicyness (docs/staleness.md)."""
    max_batch_size: int | None = Field(None, ge=1)
    """Most groups one step takes where more are finished by the time it starts; null = batch_size. More than one step's worth can be waiting
    only where rollout.max_head_offpolicyness is above 0; at 0 every step takes exactly batch_size."""
    path: str | None = None
    """Tasks for agents that the service starts: a JSONL or Parquet file, one task a line, or `reasoning-gym:NAME?size=500&seed=1` for generated
    ones (docs/agents.md). null = agents bring their own."""
    shuffle: bool = True
    """A new order of the tasks in every pass, fixed by seed."""


class SaverConfig(Section):
    """Models for people: folders that transformers loads, without what a run needs to go on (docs/recovery.md)."""

    freq_steps: int | None = Field(None, ge=1)
    """Save the model every so many steps; null = only at the end."""
    freq_epochs: int | None = Field(None, ge=1)
    """Also whenever so many passes over train_dataset.path are trained; null = not by epochs."""
    freq_secs: float | None = Field(None, gt=0)
    """Also whenever so many seconds have passed since the last one; null = not by time."""
    keep: int | None = Field(2, ge=1)
    """Newest saved models to keep, those of the end among them; null = all."""


class RecoverConfig(Section):
    """What a run goes on from after a stop or a crash: weights, optimizer, random state, place in the data. The newest two stay."""

    mode: RecoverMode = "auto"
    """auto: a run folder that was begun goes on from its newest good recovery state, or from the start where it has none yet; a
    damaged one is said aloud and set aside. on: from the newest or not at all, a damaged one is refused. off: a run that was begun is
    refused."""
    freq_steps: int | None = Field(None, ge=1)
    """Write it every so many steps; null = not by steps."""
    freq_epochs: int | None = Field(None, ge=1)
    """Also whenever so many passes over train_dataset.path are trained; null = not by epochs."""
    freq_secs: float | None = Field(300.0, gt=0)
    """Also whenever so many seconds have passed since the last one: the most training that a crash costs (recorded sessions are
    never lost). It is written beside training, which waits for a copy in memory only. null = not by time, and always at the end."""
    retries: int = Field(3, ge=0)
    """How often in a row a run that is up begins again by itself, as the same command would, when one of its processes (a rank, a worker, its
    gateway) has died or hangs; a new recovery state gives all of them back. 0 = it ends with the reason, as with mode=off."""


class EvaluatorConfig(Section):
    path: str | None = None
    """Held-out tasks, as in train_dataset.path, tried once each before the first and after the last step; null = no evaluation."""
    agent: str | None = None
    """The agent that tries them, as `module:attribute`; null = rollout.agent.path, else whatever agent the service starts for training."""
    freq_steps: int | None = Field(None, ge=1)
    """Also every so many steps; null = only before and after."""
    temperature: float = Field(0.0, ge=0, le=2)
    """Of evaluation sessions whose client names none; 0 = greedy, so that a rise is a real one."""


class StatsLoggerConfig(Section):
    log_dir: str | None = None
    """Folder of train.log, gateway.log, metrics.jsonl; null = `logs/` of the run folder."""
    log_interval: int = Field(1, ge=1)
    """Steps between [throughput] lines, and the steps that each of them is measured over."""


class WeightsConfig(Section):
    transfer: TransferName = "shared_memory"
    """How weights travel to the inference servers. `shared_memory`: in the memory of this host, mapped and never copied. `disk`: through
    the run folder. `delta`: through the run folder, only what changed since the version before, where that folder is on a network: 0.4 to
    8 % of the bytes with actor.dtype=bfloat16, a third and more with float32. It takes a copy in TMPDIR of the rank and of each server,
    and time to compress; in shared memory there would be nothing to save."""
    quorum: int = Field(1, ge=1)
    """Fewest inference servers that must load a version for the run to go on; with fewer it ends. A server that fails gets no
    traffic until it serves the current version; one whose process dies is started again up to five times in a row, and waited for."""
    load_timeout_seconds: float = Field(300.0, gt=0)
    """How long the rank may take to publish a version, and a server to load it. Large weights from slow disks need more."""


class RunConfig(Section):
    experiment_name: str = "areal"
    """First folder below cluster.fileroot; runs that belong together share it."""
    trial_name: str = "trial"
    """Second folder: one run. A run folder that exists is resumed, see recover.mode."""
    seed: int = 1
    """Of task order and of every sampled token; the same seed on the same batches gives the same tokens."""
    total_train_epochs: int = Field(1, ge=1)
    """Only a check that total_train_steps is at least this; agents over HTTP have no data set to pass over."""
    total_train_steps: int = Field(100, ge=1)
    """Training steps until the run ends; also the length of the learning-rate schedule."""
    cluster: ClusterConfig = ClusterConfig()
    store: StoreConfig = StoreConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    actor: ActorConfig = ActorConfig()
    ref: ModelConfig | None = None
    critic: CriticConfig | None = None
    teacher: TeacherConfig | None = None
    rollout: RolloutConfig = RolloutConfig()
    gconfig: GenerationConfig = GenerationConfig()
    train_dataset: DatasetConfig = DatasetConfig()
    saver: SaverConfig = SaverConfig()
    recover: RecoverConfig = RecoverConfig()
    evaluator: EvaluatorConfig = EvaluatorConfig()
    stats_logger: StatsLoggerConfig = StatsLoggerConfig()
    weights: WeightsConfig = WeightsConfig()
    api_gateway: ApiGatewayConfig | None = None
    model_routing: ModelRoutingConfig | None = None

    _secret_variables: frozenset[str] = PrivateAttr(default=frozenset())

    @property
    def secret_variables(self) -> frozenset[str]:
        """Environment variables that secrets were read from: processes of the run get those by their specs, and do not inherit these."""
        return self._secret_variables

    def remember_secret_variables(self, names: frozenset[str]) -> None:
        """For load.py. They are part neither of what is shown nor of what is sent."""
        self._secret_variables = names
