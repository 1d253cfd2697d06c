"""Weights in Hugging Face's layout: a folder of safetensors -> named tensors, checked against what the net expects.

    tensors = load_tensors(folder, config.parameter_shapes())
    check_tensors(tensors, config.parameter_shapes(), finite=True)   # the same check for weights that come over the wire

One file (`model.safetensors`) or several under `model.safetensors.index.json`. A name in the index is a plain file name
inside the folder: anything else is refused unread (T111). Tied heads appear once: a redundant lm_head.weight is dropped, one
that differs is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from areal.base.errors import ConfigError, ShapeError

Shapes = Mapping[str, tuple[int, ...]]

TIED = ("model.embed_tokens.weight", "lm_head.weight")

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def load_tensors(folder: Path, shapes: Shapes) -> dict[str, Tensor]:
    """Every parameter of `shapes` from the folder, in the files' own dtype. Raises ConfigError naming the file."""
    tensors: dict[str, Tensor] = {}
    ends: dict[str, Path] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (no mapping)
                    if name in TIED:
                        ends[name] = path
                    if name in shapes:
                        tensors[name] = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} cannot be read: {error}; download or convert the model again") from error
    if "lm_head.weight" not in shapes and len(ends) == len(TIED):
        refuse_untied(folder, ends)
    try:
        check_tensors(tensors, shapes)
    except ShapeError as error:
        raise ConfigError(f"{folder}: {error}; its config.json and weights do not belong together") from error
    return tensors


def refuse_untied(folder: Path, files: Mapping[str, Path]) -> None:
    """Raises ConfigError unless the tensors of these names, which config.json ties to one, are equal: loading would keep one of them
    and lose what the other had learned (T082). files: where each stands."""
    found = []
    for name, path in files.items():
        with safe_open(path, framework="pt") as file:
            found.append(file.get_tensor(name))
    if not all(torch.equal(found[0], other) for other in found[1:]):
        raise ConfigError(
            f"{folder}: {' and '.join(sorted(files))} differ, but config.json ties them to one (tie_word_embeddings), so a part of the model "
            "would be lost; set tie_word_embeddings to false in its config.json, or save the model again"
        )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, each once."""
    index = folder / _INDEX
    if not index.is_file():
        if not (folder / _SINGLE).is_file():
            raise ConfigError(f"{folder} has neither {_SINGLE} nor {_INDEX}; convert the model to safetensors")
        return [folder / _SINGLE]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{index} is not an index of safetensors files: {error!r}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or "\0" in name or not name.endswith(".safetensors"):
            raise ConfigError(f"{index} names {name!r}; only *.safetensors files inside the model folder are read")
        if not (folder / name).is_file():
            raise ConfigError(f"{index} names {name}, which is not in {folder}; the download is incomplete")
    return sorted(folder / name for name in names)


def check_tensors(tensors: Mapping[str, Tensor], shapes: Shapes, *, finite: bool = False) -> None:
    """Raises ShapeError unless exactly the names of `shapes` are there, in their shapes (and without NaN or infinity).

    A redundant lm_head.weight beside tied embeddings is let through: whoever fuses the tensors does not read it."""
    missing = sorted(shapes.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - shapes.keys() - {"lm_head.weight"})
    if missing or unknown:
        raise ShapeError(
            f"weights lack {len(missing)} tensors ({', '.join(missing[:3]) or 'none'}) "
            f"and have {len(unknown)} unknown ones ({', '.join(unknown[:3]) or 'none'})"
        )
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != tuple(shape):
            raise ShapeError(f"{name} has shape {tuple(tensor.shape)}, the net needs {tuple(shape)}")
        if not tensor.is_floating_point():
            raise ShapeError(f"{name} holds {tensor.dtype}; the net needs floating-point weights")
        if finite and not bool(torch.isfinite(tensor).all()):
            raise ShapeError(f"{name} holds NaN or infinity; the training step before it went wrong")
