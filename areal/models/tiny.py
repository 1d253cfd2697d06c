"""Tiny random nets: 0.4M parameters (0.5M with experts), a character tokenizer, a chat template. For tests and configs/tiny.yaml.

    write_tiny(folder, family="qwen3", seed=0)              # an ordinary Hugging Face folder
    write_tiny(folder, warm=True)                           # taught one-digit sums, but not well: "3+4=" -> "07"

The same family and seed give the same bytes on one machine. A warm net answers in the right form (two digits, then <|im_end|>)
but is often wrong, so that reinforcement learning has something to improve within seconds. Names in fetch: tiny-qwen3, tiny-llama,
tiny-qwen2, tiny-qwen3-moe (8 experts, 2 per token), tiny-qwen3-warm, tiny-qwen3-moe-warm. Imports torch and transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from areal.base.errors import ConfigError, TrainingError

Family = Literal["qwen3", "llama", "qwen2", "qwen3_moe"]

SPECIAL = ("<pad>", "<eos>", "<|im_start|>", "<|im_end|>")
CHARACTERS = "\n 0123456789+=-*/.,:;?!'\"()_<>abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
CONTEXT = 512
"""Longest prompt and output, in tokens (= characters)."""

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_DOUBT = 0.5  # part of every digit's label that says nothing; a perfect pupil is then right with probability 0.41
_MEDIOCRE = 0.35  # where the warm-up stops
_MOST_STEPS = 1000


def write_tiny(folder: Path, family: str = "qwen3", seed: int = 0, warm: bool = False) -> None:
    """Write the net into `folder` (made if absent). Raises ConfigError for an unknown family."""
    if family not in _CONFIGS:
        raise ConfigError(f"there is no tiny {family!r}; choose one of {', '.join(_CONFIGS)}")
    folder.mkdir(parents=True, exist_ok=True)
    with _one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _model(family)
        if warm:
            _teach_sums(model)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    save_file(on_disk(model), folder / "model.safetensors", metadata={"format": "pt"})
    build_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def build_tokenizer() -> Tokenizer:
    """One token per character; a character outside CHARACTERS becomes '?'."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def sum_prompt(x: int, y: int) -> str:
    """The user message of the toy task; `sum_answer` is what it should say."""
    return f"{x}+{y}="


def sum_answer(x: int, y: int) -> str:
    return f"{x + y:02d}"


def render(user: str) -> str:
    """The text the template makes of one user message."""
    return f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"


@contextmanager
def _one_thread() -> Iterator[None]:
    """More threads are slower on matrices this small, and would change the bytes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _model(family: str) -> Any:
    import transformers

    token_ids = {token: index for index, token in enumerate(SPECIAL)}
    config_class, model_class = _CONFIGS[family](transformers)
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    config = config_class(
        **(experts if family == "qwen3_moe" else {}),
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=token_ids["<|im_end|>"],
        pad_token_id=token_ids["<pad>"],
    )
    config.architectures, config.dtype = [model_class.__name__], torch.float32
    model = model_class(config).to(torch.float32)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=[token_ids["<|im_end|>"], token_ids["<eos>"]], pad_token_id=token_ids["<pad>"]
    )
    return model


_CONFIGS: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "qwen3": lambda library: (library.Qwen3Config, library.Qwen3ForCausalLM),
    "llama": lambda library: (library.LlamaConfig, library.LlamaForCausalLM),
    "qwen2": lambda library: (library.Qwen2Config, library.Qwen2ForCausalLM),
    "qwen3_moe": lambda library: (library.Qwen3MoeConfig, library.Qwen3MoeForCausalLM),
}


def on_disk(model: Any) -> dict[str, torch.Tensor]:
    """Its tensors as save_pretrained would write them: every expert by itself, a tied head left out."""
    from transformers.core_model_loading import revert_weight_conversion

    left_out = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    weights = {name: tensor for name, tensor in model.state_dict().items() if name not in left_out}
    return {name: tensor.contiguous() for name, tensor in revert_weight_conversion(model, weights).items()}


def _teach_sums(model: Any) -> None:
    """Supervised steps on all one-digit sums until a sampled answer is right with probability _MEDIOCRE (exact, over all 100).

    Each digit's label is _DOUBT parts spread evenly and the rest on the right one, so the net comes to know the sums but says
    them without conviction: steady under reinforcement, which a net stopped early on hard labels is not (measured)."""
    tokenizer = build_tokenizer()
    sums = [(x, y) for x in range(10) for y in range(10)]
    texts = [render(sum_prompt(x, y)) + sum_answer(x, y) + "<|im_end|>" for x, y in sums]
    ids = torch.tensor([encoding.ids for encoding in tokenizer.encode_batch(texts)])
    answers = ids[:, -3:, None]  # two digits and the end
    digits = torch.tensor([tokenizer.token_to_id(character) for character in "0123456789"])
    labels = torch.zeros(len(sums), 3, tokenizer.get_vocab_size())
    labels[:, 0, digits[:2]] = _DOUBT / 2
    labels[:, 1, digits] = _DOUBT / 10
    certain = torch.tensor([1 - _DOUBT, 1 - _DOUBT, 1.0]).expand(len(sums), 3)
    labels.scatter_add_(2, answers, certain[:, :, None])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)
    model.train()
    for _ in range(_MOST_STEPS):
        logprobs = model(input_ids=ids, use_cache=False, logits_to_keep=4).logits[:, :-1].log_softmax(-1)
        if logprobs.gather(2, answers).sum((1, 2)).exp().mean() >= _MEDIOCRE:
            model.eval()
            return
        optimizer.zero_grad()
        (-(logprobs * labels).sum(-1).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    raise TrainingError(f"the tiny net did not learn its sums in {_MOST_STEPS} steps; try another seed")
