"""The net being trained: any Hugging Face causal LM whose attention goes through transformers' attention interface.

    policy = load_policy(model_dir, dtype="float32", gradient_checkpointing=False)
    logprobs, entropy = policy(packed)                     # [m] each, with gradient to the parameters

The body runs over the packed tokens with their own positions and a forest mask (batch.py); no KV cache, no logits tensor: hidden states
at the predicting tokens go through the head in chunks (algorithms/logprobs.py). At load the whole path is compared with the model's own
logits on a few tokens, so a family that scales or caps its logits, or attends otherwise, is refused instead of trained wrongly.
Dropout is off: the policy that is trained is the one that samples. transformers is imported on the first load.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from areal.algorithms.logprobs import token_logprobs
from areal.base.errors import ConfigError
from areal.engine.batch import PackedBatch, QueryBlock
from areal.engine.net import DTYPES, Net, attend_blocks, without_twins
from areal.models.hf_weights import refuse_untied

ATTENTION = "areal_forest"


class PolicyNet(Net):
    """A causal LM with its parameters in Hugging Face names."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @property
    def vocabulary(self) -> int:
        return int(self._head.weight.shape[0])

    def forward(self, packed: PackedBatch) -> tuple[Tensor, Tensor]:
        """Log-probs [m] and entropies [m] of the packed predictions, float32."""
        packed = packed.to(self.device)
        sources, head = hidden_states(self.model.base_model, packed), self._head
        return token_logprobs(sources, head.weight, packed.target, packed.temperature, bias=getattr(head, "bias", None))

    @property
    def _head(self) -> Any:
        return self.model.get_output_embeddings()

    def layers(self) -> list[nn.Module]:
        return list(self.model.base_model.layers)

    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from without_twins(self.model)

    def config_files(self) -> dict[str, bytes]:
        return config_files(self.model.config)


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


def load_policy(model_dir: str | os.PathLike[str], *, dtype: str, gradient_checkpointing: bool = False) -> PolicyNet:
    """The model of this folder, ready to train. Raises ConfigError naming the folder when it cannot be."""
    if not (Path(model_dir) / "config.json").is_file():
        raise ConfigError(f"{model_dir} has no config.json; actor.path must be a folder of a Hugging Face model")
    model = _from_pretrained(model_dir, DTYPES[dtype])
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise ConfigError(
            f"{model_dir} has layers of kind {', '.join(sorted(unknown))}, which the packed engine cannot train; use a model with plain attention"
        )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    policy = PolicyNet(model)
    _check_against_own_logits(policy, str(model_dir))
    if gradient_checkpointing:
        # transformers renamed it during 5.x
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    model.train()
    return policy


def _from_pretrained(model_dir: str | os.PathLike[str], dtype: torch.dtype) -> Any:
    from safetensors import SafetensorError
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    AttentionInterface.register(ATTENTION, forest_attention)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            model_dir,
            dtype=dtype,
            attn_implementation="sdpa",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,  # never unpickle a .bin
        )
        _check_names(model, Path(model_dir))
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"cannot load the model in {model_dir}: {error}") from error
    return model


def _check_names(model: Any, folder: Path) -> None:
    """Every weight must stand in the folder under a name it is trained under: none made up at random (a checkpoint with
    gaps loads with a mere warning), none renamed or fused on the way in, since weights go out under the names in memory."""
    from safetensors import safe_open

    on_disk: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            on_disk |= dict.fromkeys(opened.keys(), file)
    if model.config.get_text_config().tie_word_embeddings:
        ends = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
        named = model.named_parameters(remove_duplicate=False)
        there = {name: on_disk[name] for name, p in named if name in on_disk and any(p is end for end in ends)}
        refuse_untied(folder, there)
    aliases: dict[int, list[str]] = {}
    for name, tensor in model.state_dict().items():
        aliases.setdefault(tensor.data_ptr() if tensor.numel() else id(tensor), []).append(name)
    for names in aliases.values():
        if not on_disk.keys() & set(names):
            raise ConfigError(
                f"{folder} has no weight {names[0]!r}, which {type(model).__name__} trains: the checkpoint is incomplete, or of "
                "a family whose weights are renamed while loading (fused experts), which this engine cannot publish yet"
            )


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


@torch.no_grad()
def _check_against_own_logits(policy: PolicyNet, model_dir: str) -> None:
    """Refuse a model whose own logits differ from what `logprobs` computes, on a two-branch forest of a few tokens."""
    import numpy as np

    from areal.engine.batch import pack
    from areal.engine.rows import RowArrays

    vocabulary = policy.vocabulary
    stem = [7 % vocabulary, 11 % vocabulary, 3 % vocabulary]
    rows = []
    for tail in ([5 % vocabulary, 2 % vocabulary], [6 % vocabulary, 4 % vocabulary]):
        ids = np.array(stem + tail, dtype=np.int32)
        ones = np.ones(len(ids), dtype=np.float32)
        trained = np.arange(len(ids)) >= len(stem)
        rows.append(RowArrays("load check", 0, ids, trained, ones, ids, ones, ones))
    model = policy.model.eval()
    own = []
    for row in rows:
        logits = (
            model(input_ids=torch.from_numpy(row.ids).long()[None].to(policy.device), use_cache=False).logits[0].float()
        )
        own.append(
            logits.log_softmax(-1)[:-1].gather(1, torch.from_numpy(row.ids[1:]).long()[:, None].to(policy.device))[
                2:, 0
            ]
        )
    try:
        model.set_attn_implementation(ATTENTION)
        [packed] = pack(rows, max_tokens=64)
        ours, _ = policy(packed)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{model_dir}: {type(model).__name__} does not take packed rows ({error}); use another family of model"
        ) from error
    order = np.lexsort((packed.position, packed.row))
    gap = (ours[torch.from_numpy(order)].cpu() - torch.cat(own).cpu()).abs().max().item()
    tolerance = 1e-3 if policy.model.get_output_embeddings().weight.dtype == torch.float32 else 0.5
    if not gap < tolerance:
        raise ConfigError(
            f"{model_dir}: log-probs through the packed path differ from {type(model).__name__}'s own by {gap:.3g} "
            f"(more than {tolerance}); this family scales its logits or attends in a way the engine does not know, use another"
        )
