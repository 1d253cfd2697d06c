"""The critic's net: the body of a causal LM with one number per state in the place of the vocabulary.

    critic = load_critic(model_dir, dtype="float32")
    values, entropy = critic(packed)                       # [m] with gradient; the entropy of a value is 0

The value belongs to the state *before* the token it stands at, as the log-prob does. The head starts at 0, so that the first values say
nothing. Everything else is the policy's: packing, attention, checks at load (model.py). Used by engine.py for the role `critic`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from areal.engine.batch import PackedBatch
from areal.engine.model import config_files, hidden_states, load_policy
from areal.engine.net import Net
from areal.models.value_head import ValueHead


class ValueNet(Net):
    """A body and a value head, with the body's parameters in Hugging Face names and the head's below `value_head.`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.body = model.base_model
        self._config = model.config
        weight = self.body.get_input_embeddings().weight
        self.value_head = ValueHead(int(weight.shape[1])).to(weight.device)
        self._vocabulary = int(weight.shape[0])

    @property
    def vocabulary(self) -> int:
        return self._vocabulary

    def forward(self, packed: PackedBatch) -> tuple[Tensor, Tensor]:
        """Values [m], float32, and zeros [m]."""
        packed = packed.to(self.device)
        values = self.value_head(hidden_states(self.body, packed))
        return values, torch.zeros_like(values)

    def layers(self) -> list[nn.Module]:
        return list(self.body.layers)

    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from ((name, p) for name, p in self.body.named_parameters() if p.requires_grad)
        yield from ((f"value_head.{name}", p) for name, p in self.value_head.named_parameters())

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, tensor.detach()) for name, tensor in self.body.state_dict().items())
        yield from ((f"value_head.{name}", tensor.detach()) for name, tensor in self.value_head.state_dict().items())

    def config_files(self) -> dict[str, bytes]:
        return config_files(self._config)


def load_critic(model_dir: str | os.PathLike[str], *, dtype: str, gradient_checkpointing: bool = False) -> ValueNet:
    """A critic that starts from this folder's language model. Raises ConfigError as load_policy does."""
    return ValueNet(load_policy(model_dir, dtype=dtype, gradient_checkpointing=gradient_checkpointing).model)
