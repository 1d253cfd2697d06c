"""Memory of the rank that needs most, byte by byte as the engine holds it.

    memory = rank_memory(shape, spec, job, device, "full")
    memory.total, memory.rows()

What autograd keeps was read off with saved-tensor hooks (llama and qwen3 through transformers' modules, engine/model.py); tests/tools compare
the sum with a real step's peak. A step has three moments that can be the peak: the end of a forward pass over the last
micro-batch (all activations and the head's gradient are there), the backward pass of a layer that was computed again, and
the optimizer. The assumptions are listed in docs/parallel_plan.md. Neighbours: traffic.py (seconds), engine/batch.py and algorithms/logprobs.py (whose constants stand here too,
because those import torch; a test holds them together).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import gcd

from areal.config.backend_spec import BackendSpec
from areal.engine.parallel.schedule import stage_layers
from areal.tools.plan.devices import Device
from areal.tools.plan.layout import Checkpointing, Job, exchanges_heads
from areal.tools.plan.shape import Shape

QUERY_BLOCK = 256
"""Queries of one attention block (engine/batch.py: BLOCK)."""
HEAD_CHUNK = 128
"""Tokens whose logits exist at once (algorithms/logprobs.py: CHUNK)."""
KEPT_BYTES = 96 * 2**20
"""Of probabilities that a forward pass keeps (algorithms/logprobs.py: KEEP_BYTES)."""
HEAP_BYTES = 32 * 2**20
"""Of the largest block in glibc's heap; larger ones, such as most embeddings, are mapped by themselves and leave no holes."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes at the peak. gathered: parameters of other ranks that are here for a while, and their gradients. logits: of the head, its gradient
    included. runtime, and allocator (its holes): devices.py. moment: when in a step that is. host: not on the device (offload)."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    logits: int
    runtime: int
    allocator: int
    moment: str
    host: int = 0

    @property
    def total(self) -> int:
        return sum(self.rows().values())

    def rows(self) -> dict[str, int]:
        """By name, in order."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("moment", "host")}


@dataclass(frozen=True, slots=True)
class Stage:
    """A pipeline stage: layers, of which `sparse` have experts; whether embedding and head stand there; micro-batches in flight (1F1B)."""

    layers: int
    sparse: int
    first: bool
    last: bool
    in_flight: int


@dataclass(frozen=True, slots=True)
class Share:
    """Parameters of one stage on one rank. `whole`: of its tensor and expert share, as FSDP gathers them; `own`: what it keeps of that.
    layer, root: the part of `whole` that one layer, and embedding, head and last norm, make up."""

    whole: int
    own: int
    layer: int
    root: int


def stages_of(shape: Shape, spec: BackendSpec, job: Job) -> list[Stage]:
    """From the first to the last."""
    found: list[Stage] = []
    for number, layers in enumerate(map(len, stage_layers(shape.layers, spec.p))):
        sparse = min(layers, _up(shape.expert_layers * layers, shape.layers))
        in_flight = min(spec.p - number, micro_batches(spec, job))
        found.append(Stage(layers, sparse, number == 0, number == spec.p - 1, in_flight))
    return found


def kinds_of(stages: list[Stage]) -> list[Stage]:
    """Of stages that differ in what is in flight alone, the first, which has most: at most four are left, however many there are."""
    return list({(each.layers, each.first, each.last): each for each in reversed(stages)}.values())


def pieces_of(spec: BackendSpec, replicas: int) -> tuple[int, int]:
    """Ranks over which FSDP cuts: d * c by the replicas; for experts those of d, c and t that have the same ones, by as many replicas as fit them."""
    same = spec.stage_size // (spec.e * spec.et)
    return spec.d * spec.c // replicas, same // gcd(same, replicas)


def share_of(shape: Shape, spec: BackendSpec, stage: Stage, replicas: int = 1) -> Share:
    """What is cut by t, e and then by FSDP."""
    shards, copies = pieces_of(spec, replicas)
    split = shape.attention // spec.t + shape.norms
    dense = split + shape.mlp // spec.t
    experts = shape.experts // spec.e * shape.expert // spec.et if shape.experts else 0
    tables = 1 if shape.tied and stage.first and stage.last else stage.first + stage.last
    root = tables * _up(shape.table, spec.t) + shape.hidden * stage.last
    cut = (stage.layers - stage.sparse) * dense + stage.sparse * (split + shape.router) + root
    return Share(
        whole=cut + stage.sparse * experts,
        own=_up(cut, shards) + stage.sparse * _up(experts, copies),
        layer=max(dense if stage.sparse < stage.layers else 0, split + shape.router + experts if stage.sparse else 0),
        root=root,
    )


def layer_activations(shape: Shape, spec: BackendSpec, job: Job, device: Device, *, experts: bool) -> int:
    """Bytes that autograd keeps of one layer and one micro-batch, without checkpointing. experts: of a layer that has them."""
    b, t = job.width, spec.t
    n = _up(job.packed_tokens, spec.c)
    d, q, kv = shape.hidden, shape.query_width // t, shape.kv_width // t
    # Two norms, and what of them goes to the maps (gathered over t).
    norm = norm_bytes(spec, job, device)
    kept = 2 * (_up(n, t) * norm + n * b) * d
    if shape.qk_norm:
        kept += n * norm * (q + kv)
    # Rotated queries, attention's outputs by block and in one piece; keys and values, repeated for every query head; masks as numbers. Where c
    # exchanges heads, a rank has all tokens for its share of the heads, else all keys and its share of the queries.
    exchanged = exchanges_heads(shape, spec)
    kept += n * 3 * q * b + 2 * (n if exchanged else job.packed_tokens) * q * b + n * 4 * shape.heads // t
    kept += mask_numbers(job, job.packed_tokens if exchanged else n) * b
    kept += n * job.lora_rank * b * (4 if experts else 7)  # what A says
    if not experts:
        return kept + 4 * n * (shape.intermediate // t) * b
    # Router: probabilities in float32. Per copy of a token: input, gate, up, activated, product, output before its weight. Where an expert lies in
    # et pieces, each has the tokens of et ranks and as much less of the inner width.
    copies = _up(n, t) * shape.experts_per_token
    kept += _up(n, t) * shape.experts * 4
    return kept + copies * ((1 + spec.et) * d + 4 * shape.expert_intermediate) * b


def norm_bytes(spec: BackendSpec, job: Job, device: Device) -> int:
    """Bytes that a norm keeps of each number. transformers': what came in as float32, and the normalised in the dtype. archon's is torch's own:
    both in float32, or where it is fused only what came in."""
    if spec.name != "archon":
        return 4 if job.lora_rank else 4 + job.width  # the latter for the gradient of its weight
    return job.width if device.fused_norms else 8


def mask_numbers(job: Job, queries: int) -> int:
    """Numbers in the masks of one layer: SDPA turns them into floats and keeps these. Rows of the longest length, block by block."""
    row = min(job.sequence, job.packed_tokens)
    return queries * (row + min(row, QUERY_BLOCK)) // 2


def kept_activations(
    shape: Shape, spec: BackendSpec, job: Job, device: Device, checkpointing: Checkpointing, *, experts: bool
) -> int:
    """The same with checkpointing: `full` keeps each layer's input; `selective` also what matrix products and attention gave, and computes the
    cheap rest again."""
    if checkpointing == "none":
        return layer_activations(shape, spec, job, device, experts=experts)
    n = _up(job.packed_tokens, spec.c)
    one = _up(n, spec.t) * shape.hidden * job.width
    if checkpointing == "full":
        return one
    width = 2 * shape.query_width + 2 * shape.kv_width
    if not experts:
        return 3 * one + n * (width + 2 * shape.intermediate) // spec.t * job.width
    copies = _up(n, spec.t) * shape.experts_per_token
    return (
        2 * one + n * width // spec.t * job.width + copies * (shape.hidden + 2 * shape.expert_intermediate) * job.width
    )


def rank_memory(shape: Shape, spec: BackendSpec, job: Job, device: Device, checkpointing: Checkpointing) -> Memory:
    """Of the stage that needs most: the first ones hold most micro-batches, the last one has the head."""
    found = [_stage(shape, spec, job, device, checkpointing, stage) for stage in kinds_of(stages_of(shape, spec, job))]
    return max(found, key=lambda memory: memory.total)


def micro_batches(spec: BackendSpec, job: Job) -> int:
    """Of one data rank and step; at least one, since every rank takes part in every gather."""
    return max(1, _up(job.batch_tokens, spec.d * job.packed_tokens))


def _stage(
    shape: Shape, spec: BackendSpec, job: Job, device: Device, checkpointing: Checkpointing, stage: Stage
) -> Memory:
    share, sparse, last = share_of(shape, spec, stage, job.replicas), stage.sparse, stage.last
    dense = kept_activations(shape, spec, job, device, checkpointing, experts=False) if sparse < stage.layers else 0
    expert = kept_activations(shape, spec, job, device, checkpointing, experts=True) if sparse else 0
    activations = stage.in_flight * ((stage.layers - sparse) * dense + sparse * expert)
    logits = _logits(shape, spec, job) if last else 0
    if last:  # the last norm and what of it goes to the head
        activations += _up(job.packed_tokens, spec.c) * shape.hidden * (4 + 3 * job.width)
    again = 0
    if checkpointing != "none":
        again = layer_activations(shape, spec, job, device, experts=sparse > 0) - max(dense, expert)
        again += _layer_backward(shape, spec, job)
    trained = _trained(shape, spec, job, share)
    head_gradient = _up(shape.table, spec.t) * job.width if last and not job.lora_rank else 0
    at_head, in_layer = logits + head_gradient, again + (head_gradient if shape.tied else 0)
    moment = "after a forward pass"
    if at_head >= in_layer:
        logits = at_head
    else:
        activations, logits, moment = activations + again, in_layer - again, "while a layer is computed again"
    b = job.width
    weights = share.own * b + (trained * b if job.lora_rank else 0)
    gradients = trained * (4 if job.replicas > 1 else b)  # not yet summed over the replicas, they are float32
    passing = _passing(shape, spec, job, share, stage.layers) if device.one_heap else 0
    backward = Memory(
        weights=weights,
        gradients=gradients,
        optimizer=trained * (8 if b == 4 else 12),
        gathered=_gathered(share, spec, job),
        activations=activations,
        logits=logits,
        runtime=device.runtime,
        allocator=int(device.holes * (activations + gradients + passing)),
        moment=moment,
    )
    if b == 4:
        return _offloaded(backward, job, device, trained)
    # The optimizer's moment: float32 copies of the gradients, and no activations.
    step = trained * 4
    update = replace(
        backward,
        gradients=step,
        gathered=0,
        activations=0,
        logits=0,
        allocator=int(device.holes * step),
        moment="at the optimizer's update",
    )
    both = (_offloaded(each, job, device, trained) for each in (backward, update))
    return max(both, key=lambda memory: memory.total)


def _trained(shape: Shape, spec: BackendSpec, job: Job, share: Share) -> int:
    """Parameters of this rank that have gradients and moments."""
    return _up(shape.adapters(job.lora_rank), pieces_of(spec, job.replicas)[0]) if job.lora_rank else share.own


def _offloaded(memory: Memory, job: Job, device: Device, trained: int) -> Memory:
    """What the host has instead of the device. On a CPU both are one memory: nothing leaves, and what the device would compute with are copies."""
    if job.offload == "none":
        return memory
    masters = trained * 4 if job.offload == "optimizer" and job.width == 4 else 0  # else they are there already
    if device.one_heap:
        return replace(memory, optimizer=memory.optimizer + masters)
    if job.offload == "optimizer":
        copies = memory.gradients if job.width == 4 else trained * 4
        kept = trained * job.width if memory.moment == "at the optimizer's update" else memory.gradients
        return replace(memory, optimizer=0, gradients=kept, host=memory.optimizer + masters + copies)
    stay = job.replicas > 1 and memory.moment != "at the optimizer's update"  # until they are summed over the replicas
    gradients = memory.gradients if stay else 0
    host = memory.weights + memory.gradients + memory.optimizer
    return replace(memory, weights=0, gradients=gradients, optimizer=0, host=host)


def _logits(shape: Shape, spec: BackendSpec, job: Job) -> int:
    """Probabilities that are kept, and one chunk's logits with their log-softmax."""
    vocabulary = _up(shape.vocabulary, spec.t)
    row = 4 * vocabulary
    kept = min(KEPT_BYTES // (HEAD_CHUNK * row) * HEAD_CHUNK, _up(job.packed_tokens, spec.c)) * row
    chunk = min(HEAD_CHUNK, job.packed_tokens) * (2 * row + (job.width * vocabulary if job.width == 2 else 0))
    return kept + chunk


def _layer_backward(shape: Shape, spec: BackendSpec, job: Job) -> int:
    """Gradients of activations inside one layer: of the map's three inner tensors and of the hidden states."""
    n = _up(job.packed_tokens, spec.c)
    inner = shape.intermediate // spec.t
    if shape.experts:
        inner = shape.experts_per_token * shape.expert_intermediate // spec.t
    return n * (3 * inner + 2 * shape.hidden) * job.width


def _is_gathered(share: Share, job: Job) -> bool:
    """Whether FSDP makes copies of what it computes with: also of pieces that are all, where each rank holds a replica."""
    return share.own < share.whole or job.replicas > 1


def _passing(shape: Shape, spec: BackendSpec, job: Job, share: Share, layers: int) -> int:
    """What the exchanges of other ranks take from one heap and give back in a pass, layer by layer. FSDP gathers parameters twice, each time into one
    flat block and from there into tensors of their own; whole gradients are made once, and laid flat in float32 to be summed. Around its maps
    t leaves hidden states whole: of a layer two outputs, the two gradients of these brought together again, and five of what went into the maps."""
    passing = 0
    if _is_gathered(share, job):
        numbers = share.whole - (share.root if share.root * job.width > HEAP_BYTES else 0)
        passing += numbers * (4 * job.width + (0 if job.lora_rank else job.width + 4))
    if spec.t > 1:
        passing += 9 * layers * _up(job.packed_tokens, spec.c) * shape.hidden * job.width
    return passing


def _gathered(share: Share, spec: BackendSpec, job: Job) -> int:
    """FSDP: embedding and head stay gathered from the first layer to the last, layers come one by one with the next one on its way; in the
    backward pass one layer's gradients, and their float32 copies, wait for being summed."""
    if not _is_gathered(share, job) and job.offload != "all":
        return 0
    if job.lora_rank:  # the gradients of adapters are small
        return share.root * job.width + share.layer * 2 * job.width
    return share.root * job.width + share.layer * (2 * job.width + job.width + 4)


def _up(number: int, by: int) -> int:
    return -(-number // by)
