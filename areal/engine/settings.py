"""What a rank is told at its start, apart from what every child is told: the job's part of the spec file.

    spec = EngineSettings.of(resolved(config), model_dir=path, threads=1, total_steps=100, seed=1).spec()
    settings = EngineSettings.model_validate(job)          # in the rank

Everything is resolved here (config/algorithms.py): no `auto`, no open key, no 0 threads. No torch. Used by launch.py (writes) and engine/worker.py (reads).
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field

from areal.config.engine import ActorConfig, Checkpointing, ContextKind, Dtype, LoraConfig, Offload, OptimizerConfig
from areal.config.objective import KlEstimator, LossAggregation, ProximalMethod, RejectionSamplingConfig
from areal.config.run import TransferName
from areal.config.section import Section

EngineRole = Literal["policy", "frozen", "critic"]


class EngineSettings(Section):
    role: EngineRole = "policy"
    """policy: trained by `algorithm`. frozen: scores only. critic: has a value head, learns the returns."""
    model_dir: str
    """A folder with config.json, safetensors and tokenizer files."""
    backend: str = "fsdp:d1"
    """Engine and layout (config/backend_spec.py); as many processes as its size have these settings."""
    algorithm: str
    """A name of algorithms.ALGORITHMS."""
    threads: int = Field(ge=1)
    """CPU threads of this rank."""
    total_steps: int = Field(ge=1)
    """Training steps of the run: the length of the learning-rate schedule."""
    seed: int = 1
    deterministic: bool = False
    """Refuse operations that do not repeat bit for bit."""
    step_timeout_seconds: float = Field(1800.0, gt=0)
    """How long one command may take before the ranks are asked why."""
    transfer: TransferName = "shared_memory"
    dtype: Dtype = "float32"
    optimizer: OptimizerConfig = OptimizerConfig()
    eps_clip: float = 0.2
    eps_clip_higher: float | None = None
    c_clip: float | None = None
    use_decoupled_loss: bool = True
    prox_logp_method: ProximalMethod = "recompute"
    rejection_sampling: RejectionSamplingConfig = RejectionSamplingConfig()
    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 1.05
    m2_threshold: float = 0.04
    kl_ctl: float = 0.0
    """Weight of the KL to the reference in the loss; 0 where it is taken off the reward."""
    kl_estimator: KlEstimator = "k3"
    rl_loss_weight: float = 1.0
    distill_loss_weight: float = 0.005
    loss_aggregation: LossAggregation = "token_mean"
    fixed_length: int = 0
    """Tokens that fixed_length divides by, per session."""
    mini_batch_size: int | None = None
    max_tokens_per_mb: int = 1024
    gradient_checkpointing: Checkpointing = "none"
    lora: LoraConfig | None = None
    """An adapter is all that is trained, saved and published."""
    is_reference: bool = False
    """With an adapter: without it, this net is the run's reference too."""
    offload: Offload = "none"
    replicas: int = 1
    """How often this net is held whole; divides the backend's d."""
    moe_aux_loss: float = 0.0
    moe_bias_rate: float = 0.0
    pipeline_chunks: int = 1
    """Stages per rank of a pipeline."""
    context_parallel: ContextKind | None = None
    sequence_parallel: bool = True

    @classmethod
    def of(cls, actor: ActorConfig, **resolved: Any) -> Self:
        """The actor's own keys as they are; `resolved`: model_dir, threads, total_steps, seed, deterministic, transfer, fixed_length."""
        own = {name: getattr(actor, name) for name in cls.model_fields if name in ActorConfig.model_fields}
        return cls(**(own | resolved))

    def spec(self) -> dict[str, Any]:
        """As JSON values, for Job.spec."""
        return self.model_dump(mode="json")
