"""What trains, and what it asks (`actor`, `critic`, `ref`, `teacher`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from areal.config.objective import ObjectiveConfig
from areal.config.section import Section

Dtype = Literal["float32", "bfloat16"]
ContextKind = Literal["allgather", "ulysses"]
Offload = Literal["none", "optimizer", "all"]
LrSchedule = Literal["constant", "linear", "cosine"]


def _yes_or_no(value: Any) -> Any:
    return ("full" if value else "none") if isinstance(value, bool) else value


Checkpointing = Annotated[Literal["none", "selective", "full"], BeforeValidator(_yes_or_no)]


class OptimizerConfig(Section):
    lr: float = Field(1e-6, gt=0)
    """AdamW's learning rate at the top of the schedule. 1e-6 for billions of parameters, 2e-5 for the bundled 135M."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled decay per step, times lr; 0 to 0.1."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Memory of the gradient's mean."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Memory of the gradient's square; 0.95 forgets old policies sooner than the usual 0.999."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the square; 1e-6 or more if bfloat16 gradients blow up."""
    lr_scheduler_type: LrSchedule = "constant"
    """Shape after the warm-up, over total_train_steps."""
    warmup_steps: int = Field(0, ge=0)
    """Training steps of linear warm-up from 0."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Where linear and cosine end, as a part of lr."""
    gradient_clipping: float = Field(1.0, gt=0)
    """Largest global gradient norm; larger gradients are scaled down to it."""


class LoraConfig(Section):
    """Train a low-rank adapter beside frozen weights, under `fsdp:` (docs/lora.md); the learning rate may be ten times that of full training."""

    rank: int = Field(16, ge=1)
    """Inner width of each adapter, 8 to 64: how much it can learn, and what it costs in memory and on the way to the servers."""
    alpha: int = Field(32, ge=1)
    """The adapter counts alpha / rank times; usually twice the rank."""
    target_modules: str = Field("all-linear", min_length=1)
    """Which linear maps of the layers have one: all-linear, or their names with commas between (`q_proj,v_proj`)."""


class ModelConfig(Section):
    path: str = ""
    """A folder with config.json and safetensors, a hub id, or the name of a bundled model (`smollm2-135m`)."""
    backend: str = "fsdp:d1"
    """Engine and its dimensions: `fsdp:d…t…e…` or `archon:d…t…p…c…e…`."""
    dtype: Dtype = "float32"
    """Of parameters and compute. bfloat16 halves memory; on CPUs without AMX it is slower."""
    replicas: int = Field(1, ge=1)
    """How often the net is held whole: its pieces lie on d * c / replicas processes, and gradients are summed over the replicas too; divides d. Takes
    more memory; for clusters where gathers between hosts are dear (docs/parallel.md)."""


class CriticConfig(ModelConfig):
    """path empty = actor.path."""

    optimizer: OptimizerConfig = OptimizerConfig()
    eps_clip: float = Field(0.5, gt=0)
    """A value moves at most this far from what it was at the start of the step before its loss goes flat."""


class TeacherConfig(ModelConfig):
    rl_loss_weight: float = Field(1.0, ge=0)
    """Weight of the reward's loss; 0 = the teacher alone, then rewards and groups do not matter."""
    distill_loss_weight: float = Field(0.005, gt=0)
    """Weight of the reverse KL to the teacher; 1 for the teacher alone."""


class ActorConfig(ObjectiveConfig, ModelConfig):
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig | None = None
    mini_batch_size: int | None = Field(None, ge=1)
    """Sequences per optimizer mini-batch; null = the whole batch makes one optimizer step."""
    max_tokens_per_mb: int = Field(1024, ge=64)
    """Token budget of one micro-batch (one forward and backward); bounds activation memory (135M in float32: 3.6 GB in all at 512, 4.6 at 1024)."""
    gradient_checkpointing: Checkpointing = "none"
    """Compute activations again in the backward pass: full = a layer keeps its input alone, a third more compute; selective = also what matrix
    products and attention gave, little more compute. true is full, false is none."""
    offload: Offload = "none"
    """What lies in the host's memory while the device computes: optimizer = moments and masters, for AdamW runs on the host; all = parameters and gradients too,
    brought to the device layer by layer. Of every net of the run. Where ranks compute on the CPU it saves nothing, and costs a copy."""
    pipeline_chunks: int = Field(1, ge=1)
    """Pipeline stages on each process of archon's `p`: 1 = 1F1B; 2 or more are interleaved, with a smaller bubble, more messages and more activations kept."""
    context_parallel: ContextKind | None = None
    """How tokens on several ranks (c) attend. ulysses swaps heads for tokens: least traffic, evenly spread work; c must divide the query heads of a t rank. allgather brings all keys and values to every rank: any heads. null = ulysses where it fits."""
    sequence_parallel: bool = True
    """Under t, a token is on one rank only between the maps: activations / t. false keeps it on all of them, for comparison."""
    moe_aux_loss: float = Field(0.0, ge=0)
    """Weight of a loss that keeps the experts of a net evenly used, 1 per sparse layer at best (docs/parallel.md); 0.001 is usual. Only archon."""
    moe_bias_rate: float = Field(0.0, ge=0)
    """How far each expert's bias moves after an optimizer step against uneven use; only the router's choice knows it. 0.001 is usual. Only archon."""
    threads: int = Field(0, ge=0)
    """CPU threads of one rank; 0 = its part of half of the cores in an asynchronous run, of all of them in a synchronous one."""
    step_timeout_seconds: float = Field(1800.0, gt=0)
    """How long the ranks of a net may take for one training step, scoring, publication or copy of a checkpoint, before the run ends with
    the name and the stack of the one that hangs. Several times the longest step."""
