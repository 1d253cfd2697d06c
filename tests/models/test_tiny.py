"""models/tiny.py: real folders that transformers loads; the same bytes again; the warm one is learnable, not learnt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from areal.base.errors import ConfigError
from areal.models.dense_config import read_config
from areal.models.fetch import check_folder
from areal.models.hf_weights import load_tensors
from areal.models.tiny import CHARACTERS, SPECIAL, render, sum_answer, sum_prompt, write_tiny

SUMS = [(x, y) for x in range(10) for y in range(10)]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2", "qwen3_moe"])
def test_transformers_loads_it(tmp_path: Path, family: str) -> None:
    write_tiny(tmp_path, family=family)
    check_folder(tmp_path)
    model = load(tmp_path)
    assert model.config.model_type == family
    low, high = (480_000, 600_000) if family == "qwen3_moe" else (380_000, 420_000)
    assert low < sum(parameter.numel() for parameter in model.parameters()) < high
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.generation_config.eos_token_id == [SPECIAL.index("<|im_end|>"), SPECIAL.index("<eos>")]
    assert model(input_ids=torch.arange(len(SPECIAL) + len(CHARACTERS))[None]).logits.isfinite().all()


def test_every_expert_lies_in_the_folder_by_itself_as_on_the_hub(tmp_path: Path) -> None:
    """transformers fuses them in memory; what it writes itself and what other engines read is this."""
    write_tiny(tmp_path, family="qwen3_moe")
    shapes = read_config(tmp_path).parameter_shapes()
    assert {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()} == shapes
    assert shapes["model.layers.1.mlp.experts.7.gate_proj.weight"] == (64, 128)
    model = load(tmp_path)
    model.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in load_tensors(tmp_path, shapes).items())
    assert again.keys() == shapes.keys()


def test_the_same_seed_gives_the_same_bytes_and_leaves_the_callers_random_state(tmp_path: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_tiny(tmp_path / name, seed=seed)
    assert torch.equal(torch.rand(3), expected)
    files = {path.name for path in (tmp_path / "a").iterdir()}
    assert files == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() != (tmp_path / "c" / "model.safetensors").read_bytes()


def test_one_token_per_character_and_the_template(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_tiny(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    plain = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": sum_prompt(3, 4)}], tokenize=False, add_generation_prompt=True
    )
    assert text == render("3+4=")
    ids = tokenizer(text).input_ids
    assert ids == plain.encode(text).ids
    assert tokenizer.decode(ids) == text == plain.decode(ids, skip_special_tokens=False)
    everything = plain.encode(CHARACTERS)
    assert everything.tokens == list(CHARACTERS)
    assert plain.encode("né").tokens == ["n", "?"]
    assert tokenizer.eos_token_id == SPECIAL.index("<|im_end|>")
    assert tokenizer.pad_token_id == 0


def test_an_unknown_family_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="qwen3, llama, qwen2"):
        write_tiny(tmp_path, family="gpt2")


def probabilities(model: Any, tokenizer: Tokenizer, answers: list[str]) -> torch.Tensor:
    """Exact probability that a sample at temperature 1 is that answer and then ends, per sum."""
    texts = [render(sum_prompt(*each)) + answer + "<|im_end|>" for each, answer in zip(SUMS, answers, strict=True)]
    ids = torch.tensor([encoding.ids for encoding in tokenizer.encode_batch(texts)])
    with torch.no_grad():
        logprobs = model(input_ids=ids).logits[:, -4:-1].log_softmax(-1)
    return logprobs.gather(2, ids[:, -3:, None]).sum((1, 2)).exp()


def test_the_warm_net_is_mediocre_and_improves_by_reinforcement(tmp_path: Path) -> None:
    """In form, right in 0.2 to 0.5 of the samples; ten plain policy-gradient steps make it better: a learnable task."""
    write_tiny(tmp_path, warm=True)
    model, tokenizer = load(tmp_path), Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    right = [sum_answer(*each) for each in SUMS]
    before = probabilities(model, tokenizer, right).mean().item()
    assert 0.2 < before < 0.5
    in_form = sum(probabilities(model, tokenizer, [f"{k:02d}"] * len(SUMS)).mean().item() for k in range(19))
    assert in_form > 0.8
    assert improved(model, tokenizer, steps=10) > before + 0.1


def improved(model: Any, tokenizer: Tokenizer, steps: int, tasks: int = 24, samples: int = 8) -> float:
    """Group-relative policy gradient on sampled answers; returns the exact accuracy over all sums afterwards."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(steps):
        chosen = [SUMS[index] for index in torch.randint(len(SUMS), (tasks,)).tolist()]
        encodings = tokenizer.encode_batch([render(sum_prompt(*each)) for each in chosen])
        ids = torch.tensor([encoding.ids for encoding in encodings]).repeat_interleave(samples, 0)
        with torch.no_grad():
            for _ in range(3):
                drawn = torch.multinomial(model(input_ids=ids, logits_to_keep=1).logits[:, -1].softmax(-1), 1)
                ids = torch.cat([ids, drawn], 1)
        said = tokenizer.decode_batch(ids[:, -3:].tolist(), skip_special_tokens=False)
        right = [sum_answer(*each) + "<|im_end|>" for each in chosen for _ in range(samples)]
        rewards = torch.tensor([float(a == b) for a, b in zip(said, right, strict=True)]).view(-1, samples)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        logprobs = model(input_ids=ids, logits_to_keep=4).logits[:, :-1].log_softmax(-1)
        taken = logprobs.gather(2, ids[:, -3:, None]).squeeze(2)
        optimizer.zero_grad()
        (-(taken * advantages.view(-1, 1)).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return probabilities(model, tokenizer, [sum_answer(*each) for each in SUMS]).mean().item()
