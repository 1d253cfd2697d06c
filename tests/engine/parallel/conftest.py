"""One pool of rank processes for all files of this folder, and nets that are awkward to cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.engine.parallel.pool import Pool, use_device

WriteNet = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def on_device(device: str) -> Iterator[None]:
    """The option `--device` says where the nets of all pools lie."""
    use_device(device)
    yield
    use_device("cpu")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    with Pool(16) as pool:
        yield pool


@pytest.fixture(scope="session")
def write_net(tmp_path_factory: pytest.TempPathFactory) -> WriteNet:
    """Writes a random net of 61 tokens, which neither 2 nor 4 divides; biases and norms are random too."""
    import transformers

    def write(family: str = "Qwen3", *, heads: int = 4, kv_heads: int = 2, **config: object) -> Path:
        torch.manual_seed(5)
        sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
        made = getattr(transformers, f"{family}Config")(
            **sizes | config, num_attention_heads=heads, num_key_value_heads=kv_heads
        )
        net = getattr(transformers, f"{family}ForCausalLM")(made)
        for name, p in net.named_parameters():
            if p.dim() == 1:
                nn.init.normal_(p, float("norm" in name), 0.1)
        folder = tmp_path_factory.mktemp(family)
        net.save_pretrained(folder)
        return folder

    return write
