"""What every net that is trained or asked has in common, whatever it is made of: model.py, critic.py (transformers), archon.py (our own).

    outputs, entropy = net(packed)               # [m] each: log-probs of the packed predictions, or a critic's values and zeros
    for name, p in net.trained_parameters(): ... # tied ones once
    for name, tensor in net.named_tensors(): ... # net.parts(name): which tensors of a model folder it is made of

A torch module, since that is what FSDP and the others wrap: go through the net by calling it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from areal.engine.adapter_files import AdapterBase
from areal.engine.batch import PackedBatch, QueryBlock
from areal.models.hf_names import Parts

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Net(nn.Module, ABC):
    """See the module's docstring. shared: parameters that stand on another stage of a pipeline too, and what they are called in a checkpoint.
    base: of a net whose `named_tensors` are an adapter, the model that it stands beside.
    computes_on: where parameters lie elsewhere than they are computed with (offload). longest: tokens of the longest row that packing with others
    leaves as it is."""

    shared: Mapping[str, str] = {}
    base: AdapterBase | None = None
    computes_on: torch.device | None = None
    longest: int | None = None

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Ids are below this."""

    @property
    def routed(self) -> tuple[int, int]:
        """Layers of the whole net, and experts of each that has some; (0, 0) where nothing of the kind is known."""
        return (0, 0)

    @property
    def device(self) -> torch.device:
        return self.computes_on or next(self.parameters()).device

    @abstractmethod
    def forward(self, packed: PackedBatch) -> tuple[Tensor, Tensor]:
        """Outputs [m] with gradient and entropies [m] without, float32."""

    @abstractmethod
    def fill(self, device: torch.device) -> None:
        """Read the weights from the model folder, of each parameter what this process holds of it after the cuts; until then it is on meta.
        Raises ConfigError where a file cannot be read."""

    def check(self) -> None:
        """Once it is filled: raises ConfigError where the model cannot be trained. All processes of the net do so together."""

    def roots(self) -> list[nn.Module]:
        """The modules that a micro-batch goes through by a call of its own."""
        return [self]

    @abstractmethod
    def layers(self) -> list[nn.Module]:
        """The repeated blocks, in order: what is sharded, checkpointed and gathered one at a time."""

    @abstractmethod
    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Tied ones once."""

    @abstractmethod
    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Everything a checkpoint holds, as it lies on this rank: parameters and persistent buffers, tied ones once, detached."""

    def parts(self, name: str) -> Parts:
        """What lies on disk of one of `named_tensors`: the tensor itself, unless the net says otherwise."""
        return {name: ()}

    @abstractmethod
    def config_files(self) -> dict[str, bytes]:
        """config.json and its kin, as they stand in a model folder."""


def attend_blocks(
    query: Tensor, key: Tensor, value: Tensor, blocks: tuple[QueryBlock, ...], *, scale: float | None = None
) -> Tensor:
    """Attention of packed tokens: query [1, h, n, e], key and value [1, h_kv, k, e]; returns [1, h, n, e].

    Each block of queries meets just the keys it may see."""
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    outputs = []
    for block in blocks:
        if isinstance(block.keys, slice):
            k, v = key[:, :, block.keys], value[:, :, block.keys]
        else:
            k, v = key.index_select(2, block.keys), value.index_select(2, block.keys)
        query_block = query[:, :, block.start : block.end]
        outputs.append(nn.functional.scaled_dot_product_attention(query_block, k, v, attn_mask=block.mask, scale=scale))
    return torch.cat(outputs, dim=2)


def without_twins(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers by name, tied ones once, under their first name; detached."""
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.detach()
