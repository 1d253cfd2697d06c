"""Random nets that can spell everything a format needs: byte-level vocabularies with the markers that real families have.

    write_net(folder, TEMPLATE)                     # plain ASCII markers are ordinary text, as Qwen's are
    write_net(folder, TEMPLATE, special=DEEPSEEK)   # these markers are special tokens, as DeepSeek's are

Beside one token a byte there are tokens that span the joints of JSON and of tags, because a mask has to take those apart. The net's
vocabulary is larger than the tokenizer's, as real ones are: ids beyond it mean nothing and must never be sampled under a grammar.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers

CONTEXT = 1024
END, OTHER_END = "<|im_end|>", "<|endoftext|>"
JOINTS = ('{"', '":', '": ', '", "', '"}', "}}", '"}}', "}\n", "}}\n", ">\n", "</", "\n<", '{"name', '"arguments', "true", "false", "12", "call>")  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)


def write_net(
    folder: Path, template: str = TEMPLATE, *, special: Sequence[str] = (), added: Sequence[str] = (), seed: int = 0
) -> Path:
    """A Hugging Face folder with a random qwen3 net. special: further special tokens; added: further ones with text."""
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level(special, added)
    size = tokenizer.get_vocab_size() + 7
    ends = [tokenizer.token_to_id(END), tokenizer.token_to_id(OTHER_END)]
    config = transformers.Qwen3Config(
        vocab_size=size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=ends,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.Qwen3ForCausalLM(config).to(torch.float32)
    config.architectures, config.dtype = ["Qwen3ForCausalLM"], torch.float32
    config.save_pretrained(folder)
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": END, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def byte_level(special: Sequence[str] = (), added: Sequence[str] = ()) -> tokenizers.Tokenizer:
    """One token a byte, the joints as merges, then the special tokens."""
    of = {chr(code): chr(code) for code in range(33, 127)} | {" ": "Ġ", "\n": "Ċ"}  # how byte-level BPE writes them
    vocabulary = {letter: k for k, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for joint in JOINTS:
        word = of[joint[0]]
        for character in joint[1:]:
            merges.append((word, of[character]))
            word += of[character]
            vocabulary.setdefault(word, len(vocabulary))
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, list(dict.fromkeys(merges))))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = ["<|im_start|>", END, OTHER_END, *special]
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in added])
    return tokenizer
