"""Tiny nets written once per test session, and rows made up from a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from areal.engine.commands import Row
from areal.engine.engine import TrainEngine
from areal.engine.settings import EngineSettings

VOCABULARY = 61


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Qwen3 with a tied head, as a Hugging Face folder."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("tiny")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"a": 1}')
    return folder


@pytest.fixture(scope="session")
def moe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Qwen3 with eight experts in each layer, two of them for each token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(5)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        norm_topk_prob=True,
        mlp_only_layers=[],
    )
    model = Qwen3MoeForCausalLM(config)
    for name, p in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            torch.nn.init.normal_(p, std=0.3)  # far enough from ties that no rounding changes a choice
    folder = tmp_path_factory.mktemp("moe")
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"a": 1}')
    return folder


@pytest.fixture
def make_settings(tiny_dir: Path) -> Callable[..., EngineSettings]:
    def make(**changes: object) -> EngineSettings:
        optimizer = {"lr": 1e-2, "gradient_clipping": 1e9} | changes.pop("optimizer", {})  # type: ignore[operator]
        base: dict[str, object] = {
            "model_dir": str(tiny_dir),
            "algorithm": "grpo",
            "threads": 1,
            "total_steps": 10,
            "optimizer": optimizer,
            "deterministic": True,
        }
        return EngineSettings.model_validate(base | changes)

    return make


@pytest.fixture
def make_engine(make_settings: Callable[..., EngineSettings]) -> Iterator[Callable[..., TrainEngine]]:
    yield lambda **changes: TrainEngine.load(make_settings(**changes))
    torch.use_deterministic_algorithms(False)


def _make_row(
    ids: list[int],
    trained: list[int],
    *,
    session: str = "s-0",
    sequence: int = 0,
    logprobs: float | list[float] = -3.0,
    advantage: float = 1.0,
    version: int = 0,
    temperature: float = 1.0,
) -> Row:
    n = len(ids)
    mask = np.zeros(n, dtype=np.bool_)
    mask[trained] = True
    recorded = np.zeros(n, dtype=np.float32)
    recorded[mask] = logprobs
    return Row(
        session_id=session,
        sequence=sequence,
        ids=np.array(ids, dtype="<i4").tobytes(),
        trained=mask.tobytes(),
        logprobs=recorded.astype("<f4").tobytes(),
        versions=np.where(mask, version, -1).astype("<i4").tobytes(),
        temperatures=np.where(mask, temperature, 1).astype("<f4").tobytes(),
        advantages=np.where(mask, advantage, 0).astype("<f4").tobytes(),
    )


def group_rows_of(
    *, groups: int = 2, samples: int = 4, prompt: int = 9, output: int = 6, seed: int = 0, turns: bool = True
) -> list[Row]:
    """Groups whose samples share a prompt; every second session has a second turn that extends the first.

    Outputs are over few ids, so samples also share their first tokens sometimes."""
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    for group in range(groups):
        stem = rng.integers(2, VOCABULARY, prompt).tolist()
        for sample in range(samples):
            number = group * samples + sample
            first = stem + rng.integers(2, 6, rng.integers(1, output + 1)).tolist()
            name = f"task{group}-{sample}"
            advantage = float(rng.normal())
            facts = {"session": name, "sequence": number, "advantage": advantage, "version": int(rng.integers(0, 2))}
            facts["temperature"] = float(rng.choice([1.0, 0.7]))
            facts["logprobs"] = float(rng.uniform(-5, -2))
            rows.append(_make_row(first, list(range(prompt, len(first))), **facts))
            if turns and sample % 2:
                second = [*first, *rng.integers(2, VOCABULARY, 3).tolist()]
                begin = len(second)
                second += rng.integers(2, 6, rng.integers(1, output + 1)).tolist()
                rows.append(_make_row(second, list(range(begin, len(second))), **facts))
    return rows


@pytest.fixture
def make_row() -> Callable[..., Row]:
    return _make_row


@pytest.fixture
def group_rows() -> Callable[..., list[Row]]:
    return group_rows_of
