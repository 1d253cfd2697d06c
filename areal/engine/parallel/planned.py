"""The tensor and expert dimensions of `fsdp:`: a model of transformers is cut by the plans that its family has there.

    experts = cut_as_planned(net, world)         # in place, on meta; None unless experts are on several ranks
    check_plan(net, world, passes)               # once it is filled: ConfigError where the plan leaves a gradient in parts

transformers' own styles cut the parameters (DTensors along t or e) and put the exchanges around each module; along e tokens travel to their experts
(all-to-all). Three things are ours. The gradient of norms of single heads is in parts over t: theirs sums it into what earlier micro-batches left
there, once more with each (`replicated_with_grad_allreduce`), so these are DTensors whose gradients say that they are partial, as in tensor.py. An embedding's
gradient is that of its own rows, theirs is of the whole vocabulary. And the output head, of which each rank of t has some rows, is not called: log-probs
are made of its rows (algorithms/logprobs.py). A style that is not listed
here is refused, and so is a plan that forgets a parameter: what is whole on all ranks of t must have one gradient. Neighbour: dims.py (archon).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from areal.base.errors import ConfigError
from areal.config.backend_spec import BackendSpec, divisors, listed
from areal.engine.batch import pack
from areal.engine.critic import ValueNet
from areal.engine.model import PolicyNet
from areal.engine.net import Net
from areal.engine.parallel.passes import Passes
from areal.engine.parallel.tensor import first_row, part_of
from areal.engine.parallel.world import World, local
from areal.engine.pretrained import keep_products_aligned, probe

_OWN = "areal_"
"""Before transformers' name of a style that is ours here."""
_TENSOR = (
    "colwise",
    "rowwise",
    "colwise_gather_output",
    "rowwise_split_input",
    "embedding_rowwise",
    "packed_colwise",
    "moe_tp_experts",
    "replicated_with_grad_allreduce",
)
_EXPERTS = ("grouped_gemm", "ep_dispatch_experts")
_APART = 1e-3
"""Of the largest number of a gradient: by so much may ranks differ in one that all of them have."""
_NOTHING = 1e-6
"""Of the largest number of all gradients: what is less is rounding."""

Plan = dict[str, str]
"""A module's or parameter's name -> transformers' name of how it is cut."""


def cut_as_planned(net: Net, world: World, *, replicas: int = 1) -> DeviceMesh | None:
    """Of experts on several ranks, the mesh (ereplicas, efsdp, e), as expert.py has it. Raises ConfigError with the sizes that fit, or for what cannot be cut so."""
    spec = world.spec
    if world.mesh is None or spec.t * spec.e == 1:
        return None
    if net.base is not None or not isinstance(net, PolicyNet | ValueNet):
        raise ConfigError(f"{spec}: adapters are not cut along t and e; fsdp:d{spec.size} fits")
    model = net.transformer
    tensor, experts = _plans(model, spec)
    _check_fits(model, spec, tensor, experts)
    mesh = _cut(model, world, tensor, experts, replicas)
    keep_products_aligned(model)
    if isinstance(net, PolicyNet) and spec.t > 1 and isinstance(net.head.weight, DTensor):
        net.cut_head(part_of(net.head.weight, world.mesh["t"]), world.mesh["t"])
    return mesh


def check_plan(net: Net, world: World, passes: Passes) -> None:
    """A backward pass over a few tokens. Raises ConfigError, on every rank alike, where ranks of t differ in the gradient of what all of them have."""
    group = world.group("t")
    if group is None or not isinstance(net, PolicyNet | ValueNet):
        return
    packs = list(pack(probe(net.vocabulary), max_tokens=64))
    with net.speaking() if isinstance(net, ValueNet) else nullcontext():
        passes.train(packs, lambda packed, outputs, entropy: outputs.sum())
    whole = {
        name: local(p.grad).detach().float().to(world.device)
        for name, p in net.trained_parameters()
        if p.grad is not None and not _is_cut(p)
    }
    for _, p in net.trained_parameters():
        p.grad = None
    own = [each.flatten() for each in whole.values()]
    mean = torch.cat([*own, torch.zeros(0, device=world.device)])
    dist.all_reduce(mean, group=group)
    sizes = [len(each) for each in own]
    means = torch.split(mean / world.size("t"), sizes)
    least = _NOTHING * max((float(each.abs().max()) for each in means if len(each)), default=0.0)
    wrong = [
        name
        for name, mine, said in zip(whole, own, means, strict=True)
        if len(said) and float((mine - said).abs().max()) > max(_APART * float(said.abs().max()), least)
    ]
    if found := [message.decode() for message in world.gather("".join(wrong[:1]).encode()) if message]:
        raise ConfigError(
            f"{type(net.transformer).__name__}: transformers' plan for t leaves the gradient of {found[0]} in parts on its ranks; "
            f"fsdp:d{world.spec.size} fits"
        )


def _plans(model: Any, spec: BackendSpec) -> tuple[Plan, Plan]:
    """Of t and of e, with the names of this model's layers."""
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES, replace_layer_number_by_wildcard

    name = type(model).__name__
    names = {replace_layer_number_by_wildcard(at) for at, _ in model.named_parameters() if "layers." in at}
    for axis, plan in (("t", model.tp_plan), ("e", model.ep_plan)):
        if getattr(spec, axis) > 1 and not any(at in plan or at.rpartition(".")[0] in plan for at in names):
            raise ConfigError(
                f"{spec}: transformers has no plan by which layers of {name} are cut along {axis}; leave {axis} out, fsdp:d{spec.size} fits"
            )
    own = _own_styles()
    for how, style in own.items():
        ALL_PARALLEL_STYLES.register(f"{_OWN}{how}", style)
    sizes = DistributedConfig(tp_size=spec.t, ep_size=spec.e, fsdp_size=spec.d, fsdp_plan={})
    tensor, experts, _ = model._resolve_parallel_plans(sizes)
    for axis, plan, known in (("t", tensor, _TENSOR), ("e", experts, _EXPERTS)):
        if strange := [(at, how) for at, how in plan.items() if how not in known]:
            at, how = strange[0]
            raise ConfigError(
                f"{spec}: transformers' plan cuts {at} of {name} along {axis} by {how!r}, which this engine does not do; leave {axis} out, "
                f"fsdp:d{spec.size} fits"
            )
    tensor |= _tied_ends(model) if tensor else {}
    return {at: f"{_OWN}{how}" if how in own else how for at, how in tensor.items()}, experts


def _tied_ends(model: Any) -> Plan:
    """Embedding and head of one weight are cut alike, whatever the plan says of either."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return {}
    names = {id(module): name for name, module in model.named_modules()}
    first, last = names[id(embedding)], names[id(head)]
    return {f"{first}.weight": "embedding_rowwise", first: "embedding_rowwise", last: "colwise_gather_output"}


def _check_fits(model: Any, spec: BackendSpec, tensor: Plan, experts: Plan) -> None:
    parameters, reasons = dict(model.named_parameters()), []
    if spec.t > 1:
        reasons += _tensor_reasons(model, spec, {at: how for at, how in tensor.items() if at in parameters})
    counts = {parameters[at].shape[0] for at, how in experts.items() if at in parameters and how == "grouped_gemm"}
    if spec.e > 1 and gcd(*counts) % spec.e:
        fits = [e for e in divisors(gcd(*counts, spec.stage_size)) if e % spec.t == 0 or e == 1]
        reasons.append(f"e{spec.e} must divide its {gcd(*counts)} experts; e of {listed(fits)} fits")
    if reasons:
        raise ConfigError(f"{spec} does not fit this {model.config.model_type} model: " + "; ".join(reasons))


def _tensor_reasons(model: Any, spec: BackendSpec, plan: Mapping[str, str]) -> list[str]:
    """plan: of parameters. What is cut must go into t even parts, but for the vocabulary, which must go round."""
    config = model.config.get_text_config()
    numbers: dict[int, str] = {}
    head = model.get_output_embeddings()
    ends = [id(model.get_input_embeddings().weight), *([id(head.weight)] if head is not None else [])]
    biases = [id(head.bias)] if getattr(head, "bias", None) is not None else []
    for at, how in plan.items():
        p = model.get_parameter(at)
        if not how.startswith(_OWN) and id(p) not in (*ends, *biases):
            numbers |= _cut_numbers(at, p, how)
    heads = [
        int(getattr(config, key, None) or config.num_attention_heads)
        for key in ("num_attention_heads", "num_key_value_heads")
    ]
    attends = any(how == "colwise" and "att" in at for at, how in plan.items())
    common = gcd(*numbers, *(heads if attends else [])) or spec.t
    vocabulary = model.get_input_embeddings().weight.shape[0]
    sizes = [t for t in divisors(common) if -(-vocabulary // t) * (t - 1) < vocabulary]
    if spec.t in sizes:
        return []
    odd = [f"the {number} of {at}" for number, at in numbers.items() if number % spec.t]
    if attends and any(each % spec.t for each in heads):
        odd = [f"its {heads[0]} query heads and {heads[1]} key heads"]
    wrong = f"must divide {odd[0]}" if odd else f"leaves a rank without any of its {vocabulary} tokens"
    return [f"t{spec.t} {wrong}; t of {listed(sizes)} fits"]


def _cut_numbers(at: str, p: Tensor, how: str) -> dict[int, str]:
    """Of what is cut of the parameter, and its name."""
    if how.startswith("rowwise"):
        return {p.shape[-1]: at} if p.ndim > 1 else {}
    if how != "packed_colwise":
        return {p.shape[max(p.ndim - 2, 0)]: at}
    if p.ndim != 3:
        raise ConfigError(
            f"transformers' plan for t cuts {at}, two maps in one, which this engine does for experts alone; leave t out"
        )
    return {p.shape[1] // 2: at}


def _cut(model: Any, world: World, tensor: Plan, experts: Plan, replicas: int) -> DeviceMesh | None:
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    spec, mesh = world.spec, world.mesh
    assert mesh is not None
    with _ends_tied_again(model):
        if spec.t > 1:
            known = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_modules()}
            apply_tensor_parallelism(model, mesh["t"], {at: how for at, how in tensor.items() if at in known})
    if spec.e == 1:
        return None
    stage = mesh["d", "t"]._flatten("stage")
    same = spec.stage_size // spec.e
    whole = gcd(same, replicas)
    found = stage._unflatten(0, (whole, same // whole, spec.e), ("ereplicas", "efsdp", "e"))
    apply_expert_parallelism(model, found["e"], mesh["t"], experts, ep_implementation="all_to_all")
    for name, how in experts.items():
        if how == "ep_dispatch_experts":
            _own_its_output(model.get_submodule(name))
    return found


def _own_its_output(module: nn.Module) -> None:
    """Families add shared experts to what the others gave, in place: FSDP's way back hangs on that tensor, and is lost where it is a view."""
    inner = module.forward
    module.forward = lambda *args, **named: inner(*args, **named).clone()


@contextmanager
def _ends_tied_again(model: Any) -> Iterator[None]:
    """What is done inside to a parameter that several modules share happens to the first, and then the others have it too."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    yield
    for (first, name), *others in places.values():
        for module, other in others:
            setattr(module, other, getattr(first, name))


def _is_cut(p: Tensor) -> bool:
    """Along t or e."""
    if not isinstance(p, DTensor):
        return False
    along = zip(p.device_mesh.mesh_dim_names or (), p.placements, strict=True)
    return any(axis in ("t", "e") and not placement.is_replicate() for axis, placement in along)


def _own_styles() -> dict[str, Any]:
    """In the place of transformers', by what those are called."""
    from transformers.distributed.tensor_parallel import TensorParallelLayer

    class Spread(TensorParallelLayer):  # type: ignore[misc]
        """A module with parameters in local pieces while it computes; what these are in the gradient's eyes is `gradient`."""

        placement: Placement
        gradient: Placement

        def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
            whole = module._parameters[param]
            assert whole is not None
            spread = distribute_tensor(whole.detach(), mesh, [self.placement], src_data_rank=None)
            module._parameters[param] = nn.Parameter(spread, requires_grad=whole.requires_grad)

        @contextmanager
        def context_around_forward(self, module: nn.Module, mesh: DeviceMesh) -> Iterator[None]:
            held: dict[str, Any] = module._parameters
            spread: dict[str, Any] = {name: p for name, p in held.items() if isinstance(p, DTensor)}
            held.update({name: p.to_local(grad_placements=[self.gradient]) for name, p in spread.items()})
            try:
                yield
            finally:
                held.update(spread)

    class OwnHeads(Spread):
        """Every rank has it whole and shows it its own heads alone."""

        placement = Replicate()
        gradient = Partial()

    class OwnRows(Spread):
        """An embedding of which this rank has some rows. (Of transformers' each rank has the gradient of the whole vocabulary.)"""

        placement = Shard(0)
        gradient = Shard(0)

        def install_forward(self, module: Any, mesh: DeviceMesh) -> Any:
            assert isinstance(module.weight, DTensor), "a plan has parameters before their modules"
            first, inner, rows = first_row(module.weight, mesh), module.forward, len(local(module.weight))
            padding = -1 if module.padding_idx is None else module.padding_idx - first
            module.padding_idx = padding if 0 <= padding < rows else None

            def forward(ids: Tensor) -> Tensor:
                at = ids - first
                elsewhere = (at < 0) | (at >= rows)
                with self.context_around_forward(module, mesh):
                    found = inner(at.masked_fill(elsewhere, 0)).masked_fill(elsewhere[..., None], 0)
                summed = DTensor.from_local(found, mesh, [Partial()], run_check=False)
                return summed.redistribute(placements=[Replicate()]).to_local()

            module.forward = forward
            return module

    return {"replicated_with_grad_allreduce": OwnHeads(), "embedding_rowwise": OwnRows()}
