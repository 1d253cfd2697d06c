"""A transformers model without its weights, and where these lie in its folder: read later, once the parameters are cut.

    model = build(folder, torch.float32)             # parameters on meta, buffers computed
    parts = parts_in_folder(model)                   # {"model.embed_tokens.weight": {"model.embed_tokens.weight": ()}, ...}
    files = weight_files_of(model, parts, folder)    # ConfigError unless every weight is there
    check_packed_path(net, model, folder, tolerance=1e-3)    # once it is filled, cut or not

No weight may be made up at random (a checkpoint with gaps loads in transformers with a mere warning), and each must go out as it came: one that
transformers renames or fuses in memory (experts, as a rule) is followed through its own conversion on a tiny stand-in, which shows
where each tensor of the folder lies in the parameter; a conversion of another kind is refused. Used by model.py, critic.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from areal.base.errors import ConfigError
from areal.engine.batch import pack
from areal.engine.net import Net, without_twins
from areal.engine.parallel.world import local
from areal.engine.rows import RowArrays
from areal.models.hf_names import Parts, part_shape
from areal.models.hf_weights import WeightFiles

ATTENTION = "areal_forest"
"""Name of model.py's attention among transformers'."""

_STEM = 3  # tokens that the rows of `probe` share


def build(folder: Path, dtype: torch.dtype) -> Any:
    """A causal LM in transformers' own attention, to be filled. Raises ConfigError naming the folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with _parameters_on_meta():
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False
            )
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load the model in {folder}: {error}") from error
    keep_products_aligned(model)
    exact = [re.compile(pattern) for pattern in getattr(model, "_keep_in_fp32_modules_strict", None) or ()]
    for name, parameter in model.named_parameters():
        if any(pattern.search(name) for pattern in exact):
            parameter.data = parameter.data.float()
    return model.eval()


def keep_products_aligned(model: Any) -> None:
    """Torch's grouped product takes rows of whole 16 bytes; of experts that have others, what is here of each is computed by itself."""
    held = [local(p) for p in model.parameters() if p.ndim == 3]
    if any(size * p.itemsize % 16 for p in held for size in p.shape[1:]):
        model.set_experts_implementation("eager")


def parts_in_folder(model: Any) -> dict[str, Parts]:
    """Of every parameter and persistent buffer, tied ones once."""
    from transformers.core_model_loading import revert_weight_conversion

    own = dict(without_twins(model))
    parts: dict[str, Parts] = {}
    for name, tensor in own.items():
        stand_in = torch.empty_like(tensor, device="meta")
        on_disk = {key: tuple(each.shape) for key, each in revert_weight_conversion(model, {name: stand_in}).items()}
        if list(on_disk.values()) == [tuple(tensor.shape)]:
            parts[name] = dict.fromkeys(on_disk, ())
        else:
            parts[name] = _stacked_parts(model, name, tuple(tensor.shape), on_disk)
    together = {name: torch.empty_like(tensor, device="meta") for name, tensor in own.items()}
    made_of = Counter(part for each in parts.values() for part in each)
    shared = [part for part, count in made_of.items() if count > 1]
    if strange := [*shared, *(made_of.keys() ^ revert_weight_conversion(model, together).keys())]:
        raise ConfigError(
            f"{type(model).__name__} makes several of its weights of {strange[0]!r}, which this engine cannot go back; use another family"
        )
    return parts


def longest_row(config: Any) -> int | None:
    """Of a transformers configuration: tokens of a row beyond which all positions of the micro-batch that it lies in turn otherwise; None: however
    long it is, they do not."""
    said = getattr(config, "rope_parameters", None) or {}
    bounds = []
    for rope in [each for each in said.values() if isinstance(each, dict)] or [said]:
        kind = str(rope.get("rope_type"))
        if kind == "longrope":
            bounds.append(int(rope["original_max_position_embeddings"]))
        elif "dynamic" in kind:
            bounds.append(int(config.max_position_embeddings))
    return min(bounds, default=None)


def weight_files_of(model: Any, parts: Mapping[str, Parts], folder: Path) -> WeightFiles:
    """Raises ConfigError unless the folder holds every part in its shape."""
    files = WeightFiles(folder)
    if model.config.get_text_config().tie_word_embeddings:
        ends = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
        named = model.named_parameters(remove_duplicate=False)
        files.refuse_untied(tuple(name for name, p in named if any(p is end for end in ends)))
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in without_twins(model):
        shapes |= {part: part_shape(place, tuple(tensor.shape)) for part, place in parts[name].items()}
    files.check(shapes, getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    if biased := [name for name in files.shapes if name.endswith("e_score_correction_bias") and name not in shapes]:
        raise ConfigError(f"{folder}: {type(model).__name__} knows no {biased[0]}; train this model with archon:")
    return files


def _stacked_parts(model: Any, name: str, shape: tuple[int, ...], on_disk: Mapping[str, tuple[int, ...]]) -> Parts:
    """Of one [experts, rows, columns] made of tensors [some of the rows, columns], found by converting numbers that count those."""
    from transformers.core_model_loading import revert_weight_conversion

    shapes = set(on_disk.values())
    rows, columns = shapes.pop() if len(shapes) == 1 and len(min(shapes)) == 2 else (0, 0)
    if len(shape) != 3 or shapes or columns != shape[2] or not rows or shape[1] % rows:
        raise _unknown(model, name)
    groups = shape[1] // rows
    numbers = torch.arange(shape[0] * groups).view(shape[0], groups, 1).repeat(1, 1, 2)
    parts: dict[str, tuple[int | slice, ...]] = {}
    for part, number in revert_weight_conversion(model, {name: numbers}).items():
        if tuple(number.shape) != (1, 2) or part not in on_disk or number[0, 0] != number[0, 1]:
            raise _unknown(model, name)
        expert, group = divmod(int(number[0, 0]), groups)
        parts[part] = (expert,) if groups == 1 else (expert, slice(group * rows, (group + 1) * rows))
    return parts


def _unknown(model: Any, name: str) -> ConfigError:
    return ConfigError(
        f"{type(model).__name__} makes {name!r} of its folder's weights in a way that this engine cannot go back; use another family"
    )


@torch.no_grad()
def check_packed_path(net: Net, model: Any, folder: Path, *, tolerance: float) -> None:
    """Refuse a model that says otherwise by itself than through `net`, on a two-branch forest of a few tokens: net(packed) and net(ids). From
    here on the model attends as packed rows need it. Every rank of a net that is cut takes part."""
    rows = probe(net.vocabulary)
    own = [net(torch.from_numpy(row.ids).long().to(net.device))[0][_STEM - 1 :] for row in rows]
    try:
        model.set_attn_implementation(ATTENTION)
        [packed] = pack(rows, max_tokens=64)
        ours, _ = net(packed)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{folder}: {type(model).__name__} does not take packed rows ({error}); use another family of model"
        ) from error
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # whoever looks at parameters next wants this rank's pieces
    order = np.lexsort((packed.position, packed.row))
    gap = (ours[torch.from_numpy(order)].cpu() - torch.cat(own).cpu()).abs().max().item()
    if not gap < tolerance:
        raise ConfigError(
            f"{folder}: what the packed path says differs from {type(model).__name__}'s own by {gap:.3g} "
            f"(more than {tolerance}); this family scales its logits or attends in a way the engine does not know, use another"
        )


def probe(vocabulary: int) -> list[RowArrays]:
    """Two rows of five tokens of which they share the first three."""
    rows = []
    for tail in ((5, 2), (6, 4)):
        ids = np.array([7, 11, 3, *tail], dtype=np.int32) % vocabulary
        ones = np.ones(len(ids), dtype=np.float32)
        rows.append(RowArrays("load check", 0, ids, np.arange(len(ids)) >= _STEM, ones, ids, ones, ones))
    return rows


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules made inside have their parameters on meta from the start, and their buffers for real: those are computed from the
    configuration and lie in no file."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
