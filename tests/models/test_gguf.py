"""models/gguf.py: the twin of each piece, and (heavy) the whole bundled model against transformers' own GGUF loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal.base.errors import ConfigError
from areal.models.gguf import convert_gguf, hugging_face_name, llama_config, tokenizer, unpermute


@pytest.mark.parametrize(("heads", "rows"), [(1, 8), (3, 24), (9, 36)])
def test_unpermute_undoes_llama_cpps_order(heads: int, rows: int) -> None:
    original = np.random.default_rng(0).standard_normal((rows, 5)).astype(np.float32)
    half = rows // heads // 2
    # llama.cpp pairs row i of a head's first half with row i of its second half.
    permuted = np.stack(
        [original[h * 2 * half + i + s * half] for h in range(heads) for i in range(half) for s in range(2)]
    )
    assert np.array_equal(unpermute(permuted, heads), original)


def test_names_are_mapped_or_refused() -> None:
    assert hugging_face_name("blk.12.ffn_down.weight") == "model.layers.12.mlp.down_proj.weight"
    assert hugging_face_name("output_norm.weight") == "model.norm.weight"
    for unknown in ("blk.0.attn_q.bias", "blk.0.ffn_gate_exps.weight", "rope_freqs.weight", ""):
        with pytest.raises(ConfigError, match="has no place"):
            hugging_face_name(unknown)


def test_what_would_be_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="'qwen2' is not converted"):
        llama_config({"general.architecture": "qwen2"}, tied=True)
    with pytest.raises(ConfigError, match=r"rope\.scaling"):
        llama_config({"general.architecture": "llama", "llama.rope.scaling.type": "yarn"}, tied=True)
    with pytest.raises(ConfigError, match="gpt2/qwen2"):
        tokenizer({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2"})


TEXTS = [
    "12345+678=",
    "What is 17+5? Reply with only the number.",
    "It's 3.14 now,\n\n\tx  y   z",
    "héllo 你好 🎉 naïve",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "def f(x):\n    return x ** 2  # ok",
    "",
]


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_smollm2_is_bit_equal_to_what_transformers_makes_of_the_gguf(tmp_path: Path) -> None:
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    from areal.models import bundled

    source = bundled._installed_gguf() or bundled._downloaded_gguf(tmp_path)
    folder = tmp_path / "converted"
    folder.mkdir()
    convert_gguf(source, folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = load_gguf_checkpoint(source, return_tensors=True, model_to_load=model)["tensors"]
    ours = model.state_dict()
    assert set(ours) - set(theirs) == {"lm_head.weight"}
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert model.config.rope_parameters["rope_theta"] == 100_000.0

    loaded = AutoTokenizer.from_pretrained(folder)
    reference = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        assert loaded(text).input_ids == reference(text).input_ids == plain.encode(text).ids, text
        assert loaded.decode(loaded(text).input_ids) == text
    # Two spaces before a digit: SmolLM2 splits digits off first; transformers' GGUF reader does not know that.
    assert loaded.tokenize("a  1") == ["a", "ĠĠ", "1"]
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = loaded.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    torch.set_num_threads(1)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in loaded.decode(answer)
