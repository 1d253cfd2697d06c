"""A causal LM of transformers with a LoRA adapter beside its weights, which stay as they are (peft, arXiv:2106.09685).

    policy = load_adapted(model_dir, lora, dtype="float32", seed=1)
    logprobs, entropy = policy(packed)                     # with gradient to the adapter alone
    with policy.as_base(): ...                             # what the model said before it was trained

The adapter has the net's dtype, and float32 masters below float32 as any weight here (optimizer.py). B begins at 0, A as peft draws it, from the
run's seed and the map's name, so that every layout begins alike. Saved and published is the adapter and nothing else; models/adapter.py says what a server makes of it. There is no
dropout: the policy that is trained is the one that samples. Maps whose weight is used past the module (output heads, fused
experts) cannot have one and are refused. Neighbours: model.py, adapter_files.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from areal.base.errors import ConfigError
from areal.config.engine import Dtype, LoraConfig
from areal.engine.adapter_files import AdapterBase
from areal.engine.batch import pack
from areal.engine.model import PolicyNet, opened
from areal.engine.net import DTYPES, without_twins
from areal.engine.parallel.pieces import fill, materialise, overlaps, runs_of, whole_runs
from areal.engine.parallel.world import CPU, World, local
from areal.engine.pretrained import probe
from areal.models.adapter import adapter_name
from areal.models.fingerprint import fingerprint
from areal.models.hf_names import Parts
from areal.models.hf_weights import WeightFiles

ALL = "all-linear"
_ADAPTER = re.compile(r"(.+)\.lora_([AB])\.default\.weight")
_BASE = ".base_layer"


class AdaptedPolicy(PolicyNet):
    """The adapter's tensors have peft's names, the base's are those of the folder."""

    def __init__(
        self, model: Any, parts: Mapping[str, Parts], files: WeightFiles, *, lora: LoraConfig, dtype: Dtype, seed: int
    ) -> None:
        """model: without weights and without adapters; these are put in here. Raises ConfigError where a map is unknown."""
        super().__init__(model, parts, files)
        own = dict(without_twins(model))
        parameters = {on_disk: name for name, found in parts.items() for on_disk in found}
        dtypes = {on_disk: own[name].dtype for on_disk, name in parameters.items()}
        found = _targets(self, lora)
        kinds = tuple(sorted({name.rpartition(".")[2] for name in found}))
        self.base = AdapterBase(lora, kinds, files, parameters, dtypes, dtype, fingerprint(files.folder)["weights"])
        self._seed = seed
        self._maps = _put_in(model, lora, found, DTYPES[dtype])

    @contextmanager
    def as_base(self) -> Iterator[None]:
        """Inside, the adapter says nothing: adding 0 changes no bit."""
        try:
            for each in self._maps:
                each.set_scale("default", 0)
            yield
        finally:
            for each in self._maps:
                each.set_scale("default", 1)

    def fill(self, device: torch.device) -> None:
        materialise(self, device)
        for name, tensor in without_twins(self.model):
            if found := _ADAPTER.fullmatch(name):
                self._begin(tensor, *found.groups())
            else:
                fill(tensor, self._parts[name.replace(_BASE, "")], self._files)

    def check(self) -> None:
        """Also raises ConfigError where the model goes past a map without its adapter."""
        super().check()
        outputs, _ = self(next(iter(pack(probe(self.vocabulary), max_tokens=64))))
        outputs.sum().backward()
        unreached = [name for name, p in self.trained_parameters() if ".lora_B." in name and p.grad is None]
        self.zero_grad(set_to_none=True)
        if unreached:
            raise ConfigError(
                f"{self._files.folder}: {type(self.model).__name__} does not go through {unreached[0]}; name other maps in "
                "actor.lora.target_modules, or take the section out"
            )

    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, p in self.model.named_parameters():
            if found := _ADAPTER.fullmatch(name):
                yield adapter_name(*found.groups()), p

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, p.detach()) for name, p in self.trained_parameters())

    def parts(self, name: str) -> Parts:
        return {name: ()}

    @torch.no_grad()
    def _begin(self, tensor: Tensor, module: str, half: str) -> None:
        """B at 0; A uniform within 1 / sqrt(in)."""
        if half == "B":
            local(tensor).zero_()
            return
        drawn = torch.Generator().manual_seed(int.from_bytes(sha256(f"{self._seed} {module}".encode()).digest()[:7]))
        whole = (torch.rand(tensor.shape, generator=drawn) * 2 - 1) * tensor.shape[1] ** -0.5
        for there, here in overlaps(whole_runs(tensor.shape), runs_of(tensor)):
            local(tensor)[here] = whole[there].to(tensor.device, tensor.dtype)


def _targets(net: PolicyNet, lora: LoraConfig) -> list[str]:
    """Full names of the linear maps that get an adapter. Raises ConfigError naming those that could."""
    layers = {id(module) for layer in net.layers() for module in layer.modules()}
    named = net.model.named_modules()
    linear = {name for name, module in named if type(module) is nn.Linear and id(module) in layers}
    known = sorted({name.rpartition(".")[2] for name in linear})
    wanted = known if lora.target_modules == ALL else [name.strip() for name in lora.target_modules.split(",")]
    if strange := [name for name in wanted if name not in known]:
        raise ConfigError(
            f"actor.lora.target_modules: the layers of {type(net.model).__name__} have no linear map {strange[0]!r}; they have "
            f"{', '.join(known) or 'none'}, and all-linear is all of them"
        )
    if not linear:
        raise ConfigError(f"{type(net.model).__name__} has no linear map for actor.lora; take the section out")
    return sorted(name for name in linear if name.rpartition(".")[2] in wanted)


def _put_in(model: Any, lora: LoraConfig, targets: list[str], dtype: torch.dtype) -> list[Any]:
    """On meta; everything else is frozen. Returns the maps that have an adapter."""
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    config = PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        target_modules=targets,
        bias="none",
        init_lora_weights=False,
    )
    inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    for name, p in model.named_parameters():
        p.requires_grad_(mine := _ADAPTER.fullmatch(name) is not None)
        if mine:
            p.data = p.data.to(dtype)  # peft makes it float32
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def load_adapted(
    model_dir: str | os.PathLike[str], lora: LoraConfig, *, dtype: Dtype, seed: int, world: World | None = None
) -> AdaptedPolicy:
    """The model of this folder with an adapter that says nothing yet; otherwise as load_policy."""
    policy = AdaptedPolicy(*opened(model_dir, dtype=dtype), lora=lora, dtype=dtype, seed=seed)
    if world is None or world.mesh is None:
        policy.fill(CPU if world is None else world.device)
        policy.check()
    return policy
