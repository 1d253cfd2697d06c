"""The net being trained: any Hugging Face causal LM whose attention goes through transformers' attention interface.

    policy = load_policy(model_dir, dtype="float32")
    logprobs, entropy = policy(packed)                     # [m] each, with gradient to the parameters

The body runs over the packed tokens with their own positions and a forest mask (batch.py); no KV cache, no logits tensor: hidden states
at the predicting tokens go through the head in chunks (algorithms/logprobs.py). At load the whole path is compared with the model's own
logits on a few tokens, so a family that scales or caps its logits, or attends otherwise, is refused instead of trained wrongly.
It stays in evaluation mode, without dropout and without noise at routers: the policy that is trained is the one that samples. transformers is
imported on the first load.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from areal.algorithms.logprobs import Part, token_logprobs
from areal.base.errors import ConfigError
from areal.engine.batch import PackedBatch, QueryBlock
from areal.engine.net import DTYPES, Net, attend_blocks, without_twins
from areal.engine.parallel.pieces import fill, materialise
from areal.engine.parallel.world import CPU, World, local
from areal.engine.pretrained import ATTENTION, build, check_packed_path, longest_row, parts_in_folder, weight_files_of
from areal.models.hf_names import Parts
from areal.models.hf_weights import WeightFiles


class PolicyNet(Net):
    """A causal LM with its parameters in transformers' names."""

    def __init__(self, model: Any, parts: Mapping[str, Parts], files: WeightFiles) -> None:
        """model: without weights; they lie in the files, `parts` says where."""
        super().__init__()
        self.model = model
        self.longest = longest_row(model.config.get_text_config())
        self._parts = parts
        self._files = files
        self._rows: tuple[Part, DeviceMesh] | None = None

    @property
    def vocabulary(self) -> int:
        return int(self.head.weight.shape[0])

    @property
    def transformer(self) -> Any:
        """What transformers' plans are of."""
        return self.model

    @property
    def head(self) -> Any:
        return self.model.get_output_embeddings()

    def cut_head(self, part: Part, mesh: DeviceMesh) -> None:
        """Each rank of the mesh has some rows of the head."""
        self._rows = (part, mesh)

    def forward(self, packed: PackedBatch | Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs [m] and entropies [m] of the packed predictions, float32. Given the ids [n] of one sequence: the model's own log-probs
        [n - 1], and zeros."""
        if isinstance(packed, Tensor):
            logits = self.model(input_ids=packed[None], use_cache=False).logits[0, :-1].float()
            logprobs = logits.log_softmax(-1).gather(1, packed[1:, None])[:, 0]
            return logprobs, torch.zeros_like(logprobs)
        packed = packed.to(self.device)
        sources, head, part = hidden_states(self.model.base_model, packed), self.head, None
        if self._rows is not None:
            part, mesh = self._rows
            spread = DTensor.from_local(sources, mesh, [Replicate()], run_check=False)
            sources = spread.to_local(grad_placements=[Partial()])  # each rank's rows say a part of it
        weight, bias = local(head.weight), getattr(head, "bias", None)
        bias = None if bias is None else local(bias)
        return token_logprobs(sources, weight, packed.target, packed.temperature, bias=bias, part=part)

    def fill(self, device: torch.device) -> None:
        materialise(self, device)
        for name, tensor in without_twins(self.model):
            fill(tensor, self._parts[name], self._files)

    def check(self) -> None:
        """Raises ConfigError where the packed path says something else than the model itself."""
        exact = self.head.weight.dtype == torch.float32
        check_packed_path(self, self.model, self._files.folder, tolerance=1e-3 if exact else 0.5)

    def layers(self) -> list[nn.Module]:
        return layers_of(self.model)

    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from without_twins(self.model)

    def parts(self, name: str) -> Parts:
        return self._parts[name]

    def config_files(self) -> dict[str, bytes]:
        return config_files(self.model.config)


def layers_of(model: Any) -> list[nn.Module]:
    """Of what speaks in it, where it sees too. Raises ConfigError where they are not found."""
    found = getattr(model.get_decoder(), "layers", None)
    if found is None:
        raise ConfigError(
            f"{type(model).__name__}: the engine does not find its layers, one by one; use fsdp:d1 without offload and checkpointing"
        )
    return list(found)


def hidden_states(body: Any, packed: PackedBatch) -> Tensor:
    """The last hidden states [m, d] at the tokens that predict."""
    hidden: Tensor = body(
        input_ids=packed.ids[None], position_ids=packed.positions[None], use_cache=False, forest=packed
    ).last_hidden_state[0]
    return hidden.index_select(0, packed.source)


def config_files(config: Any) -> dict[str, bytes]:
    """What `save_pretrained` of a transformers configuration writes."""
    with tempfile.TemporaryDirectory() as scratch:
        config.save_pretrained(scratch)
        return {file.name: file.read_bytes() for file in Path(scratch).iterdir()}


def load_policy(model_dir: str | os.PathLike[str], *, dtype: str, world: World | None = None) -> PolicyNet:
    """The model of this folder, ready to train. world: of several processes: it is to be cut, and then filled.

    Raises ConfigError naming the folder when it cannot be trained."""
    model, parts, files = opened(model_dir, dtype=dtype)
    policy = PolicyNet(model, parts, files)
    if world is None or world.mesh is None:
        policy.fill(CPU if world is None else world.device)
        policy.check()
    return policy


def opened(model_dir: str | os.PathLike[str], *, dtype: str) -> tuple[Any, dict[str, Parts], WeightFiles]:
    """The folder's model without weights, and where they lie. Raises ConfigError as load_policy does."""
    from transformers import AttentionInterface

    if not (Path(model_dir) / "config.json").is_file():
        raise ConfigError(f"{model_dir} has no config.json; actor.path must be a folder of a Hugging Face model")
    AttentionInterface.register(ATTENTION, forest_attention)
    model = build(Path(model_dir), DTYPES[dtype])
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise ConfigError(
            f"{model_dir} has layers of kind {', '.join(sorted(unknown))}, which the packed engine cannot train; use a model with plain attention"
        )
    parts = parts_in_folder(model)
    return model, parts, weight_files_of(model, parts, Path(model_dir))


def forest_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    forest: PackedBatch,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of packed tokens: query [1, h, n, e], key and value [1, h_kv, n, e]; returns [1, n, h, e].

    Each block of queries meets the keys it may see; transformers' attention interface calls it for every layer."""
    if softcap is not None or s_aux is not None:
        raise ConfigError(
            "attention with soft-capped logits or sink tokens cannot be trained by the packed engine yet; use another model"
        )
    blocks = forest.blocks
    if sliding_window is not None:
        blocks = tuple(replace(b, mask=b.mask & _within_window(forest.positions, b, sliding_window)) for b in blocks)
    return attend_blocks(query, key, value, blocks, scale=scaling).transpose(1, 2).contiguous(), None


def _within_window(positions: Tensor, block: QueryBlock, window: int) -> Tensor:
    return positions[block.start : block.end, None] - positions[block.keys][None, :] < window
