"""Small real tokenizers, trained here in a moment, in model folders as Hugging Face lays them out."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from areal.chat import JinjaRenderer, load_renderer

TEMPLATES = Path(__file__).parent / "templates"
CORPUS = [
    "The answer is 4. What is 2 + 2? Please add the numbers and say the result.",
    'def add(x, y):\n    return x + y\n\n{"name": "add", "arguments": {"x": 1, "y": 2}}',
    "user assistant system tool hello world café naïve 東京 ďábelské",
] * 3
SPECIAL = [
    "<unk>",
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
]
PLAIN_ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]

Folder = Callable[..., Path]


def byte_level() -> tokenizers.Tokenizer:
    """Byte-level BPE, as Llama 3, Qwen and SmolLM have."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _with_added(tokenizer)


def sentence_piece() -> tokenizers.Tokenizer:
    """BPE with a metaspace and byte fallback, as Llama 2 and Mistral have; adds BOS by default."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "\u2581")
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    spec = json.loads(trained.to_str())["model"]
    words = [*SPECIAL[:3], *(f"<0x{byte:02X}>" for byte in range(256)), *spec["vocab"]]
    merges = [tuple(pair) for pair in spec["merges"]]
    vocabulary = {word: k for k, word in enumerate(dict.fromkeys(words))}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = _with_added(tokenizer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def _with_added(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    tokenizer.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([tokenizers.AddedToken(text, special=False, normalized=False) for text in PLAIN_ADDED])
    return tokenizer


@pytest.fixture(scope="session")
def trained() -> dict[str, tokenizers.Tokenizer]:
    return {"byte_level": byte_level(), "sentence_piece": sentence_piece()}


@pytest.fixture(scope="session")
def folder(trained: dict[str, tokenizers.Tokenizer], tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """folder(template, tokenizer="byte_level", eos="<|im_end|>", **files) -> a model folder."""

    def make(
        template: str | None, tokenizer: str = "byte_level", eos: str = "<|im_end|>", **files: dict[str, Any]
    ) -> Path:
        path = tmp_path_factory.mktemp("model")
        trained[tokenizer].save(str(path / "tokenizer.json"))
        config: dict[str, Any] = {
            "bos_token": "<s>",
            "eos_token": {"__type": "AddedToken", "content": eos},
            "unk_token": "<unk>",
        }
        if template is not None:
            config["chat_template"] = (TEMPLATES / f"{template}.jinja").read_text("utf-8")
        (path / "tokenizer_config.json").write_text(json.dumps(config))
        for name, content in files.items():
            (path / f"{name}.json").write_text(json.dumps(content))
        return path

    return make


EVERY_MODEL: Sequence[tuple[str, str, str]] = (
    ("chatml_default_system", "byte_level", "<|im_end|>"),
    ("headers_trimmed", "byte_level", "<|eot_id|>"),
    ("instructions_alternating", "sentence_piece", "</s>"),
    ("thinking_stripped", "byte_level", "<|im_end|>"),
)


@pytest.fixture(scope="session")
def models_by_template(folder: Folder) -> dict[str, tuple[Path, JinjaRenderer]]:
    """Every fixture template with a tokenizer that suits it: its folder and its renderer."""
    found = {}
    for template, tokenizer, eos in EVERY_MODEL:
        path = folder(template, tokenizer, eos)
        found[template] = (path, load_renderer(path))
    return found
