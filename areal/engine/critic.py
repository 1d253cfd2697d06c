"""The critic's net: the body of a causal LM with one number per state in the place of the vocabulary.

    critic = load_critic(model_dir, dtype="float32")
    values, entropy = critic(packed)                       # [m] with gradient; the entropy of a value is 0

The value belongs to the state *before* the token it stands at, as the log-prob does. The head starts at 0, so that the first values say
nothing. Everything else is the policy's: packing, attention, checks at load (model.py). Used by engine.py for the role `critic`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from areal.engine.batch import PackedBatch
from areal.engine.model import config_files, hidden_states, layers_of, opened
from areal.engine.net import Net, without_twins
from areal.engine.parallel.pieces import fill, materialise
from areal.engine.parallel.world import CPU, World, local
from areal.engine.pretrained import check_packed_path, longest_row
from areal.models.hf_names import Parts
from areal.models.hf_weights import WeightFiles
from areal.models.value_head import ValueHead


class ValueNet(Net):
    """A body and a value head, with the body's parameters in Hugging Face names and the head's below `value_head.`."""

    def __init__(self, model: Any, parts: Mapping[str, Parts], files: WeightFiles) -> None:
        """model: without weights; they lie in the files, `parts` says where."""
        super().__init__()
        self.body = model.base_model
        at = f"{model.base_model_prefix}."
        self._sources = {name.removeprefix(at): found for name, found in parts.items() if name.startswith(at)}
        self._files = files
        self._config = model.config
        self.longest = longest_row(model.config.get_text_config())
        weight = self.body.get_input_embeddings().weight
        self.value_head = ValueHead(int(weight.shape[1]))
        self._vocabulary = int(weight.shape[0])

    @property
    def vocabulary(self) -> int:
        return self._vocabulary

    @property
    def transformer(self) -> Any:
        """What transformers' plans are of."""
        return self.body

    def forward(self, packed: PackedBatch | Tensor) -> tuple[Tensor, Tensor]:
        """Values [m], float32, and zeros [m]. Given the ids [n] of one sequence: values [n - 1] by the model's own way."""
        if isinstance(packed, Tensor):
            hidden = self.body(input_ids=packed[None], use_cache=False).last_hidden_state[0, :-1]
            values = self.value_head(hidden)
            return values, torch.zeros_like(values)
        packed = packed.to(self.device)
        values = self.value_head(hidden_states(self.body, packed))
        return values, torch.zeros_like(values)

    def fill(self, device: torch.device) -> None:
        materialise(self, device)
        for name, tensor in without_twins(self.body):
            fill(tensor, self._sources[name], self._files)

    def check(self) -> None:
        """Raises ConfigError where the packed path says something else than the model itself."""
        exact = self.body.dtype == torch.float32
        with self.speaking():
            check_packed_path(self, self.body, self._files.folder, tolerance=1e-3 if exact else 0.5)

    @contextmanager
    def speaking(self) -> Iterator[None]:
        """Inside, the head says something of every number, and after it nothing again."""
        weight = local(self.value_head.weight.detach())
        weight.fill_(self.value_head.weight.shape[0] ** -0.5)
        try:
            yield
        finally:
            weight.zero_()

    def layers(self) -> list[nn.Module]:
        return layers_of(self.body)

    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from ((name, p) for name, p in self.body.named_parameters() if p.requires_grad)
        yield from ((f"value_head.{name}", p) for name, p in self.value_head.named_parameters())

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, tensor.detach()) for name, tensor in self.body.state_dict().items())
        yield from ((f"value_head.{name}", tensor.detach()) for name, tensor in self.value_head.state_dict().items())

    def config_files(self) -> dict[str, bytes]:
        return config_files(self._config)


def load_critic(model_dir: str | os.PathLike[str], *, dtype: str, world: World | None = None) -> ValueNet:
    """A critic that starts from this folder's language model. Otherwise as load_policy."""
    critic = ValueNet(*opened(model_dir, dtype=dtype))
    if world is None or world.mesh is None:
        critic.fill(CPU if world is None else world.device)
        critic.check()
    return critic
