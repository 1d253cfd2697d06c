"""Weights in Hugging Face's layout: a folder of safetensors -> named tensors, checked against what the net expects.

    tensors = load_tensors(folder, config.parameter_shapes())
    check_tensors(tensors, config.parameter_shapes(), finite=True)   # the same check for weights that come over the wire
    files = WeightFiles(folder)                                      # nothing read yet but names and shapes
    with files.opened() as read:
        rows = read("model.norm.weight", (slice(0, 10),))            # only these

One file (`model.safetensors`) or several under `model.safetensors.index.json`. A name in the index is a plain file name
inside the folder: anything else is refused unread (T111). Tied heads appear once: a redundant lm_head.weight is dropped, one
that differs is refused. So is a folder whose layers have weights that the net has not: without them it would be another model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from areal.base.errors import ConfigError, ShapeError

Shapes = Mapping[str, tuple[int, ...]]

_NONE: Shapes = {}

TIED = ("model.embed_tokens.weight", "lm_head.weight")

_COMPARED_BYTES = 64 << 20

_PLAIN = ("F64", "F32", "F16", "BF16")

_IN_LAYER = re.compile(r"(|.*\.)(layers|h|blocks)\.\d+\..*\.(weight|bias)")
"""Tables of positions and masks, which old checkpoints have in their layers, are called otherwise."""

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def load_tensors(folder: Path, shapes: Shapes, optional: Shapes = _NONE) -> dict[str, Tensor]:
    """Every parameter of `shapes` from the folder, and what there is of `optional`, in the files' own dtype. Raises ConfigError naming the file."""
    tensors: dict[str, Tensor] = {}
    ends: dict[str, Path] = {}
    names: list[str] = []
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (no mapping)
                    names.append(name)
                    if name in TIED:
                        ends[name] = path
                    if name in shapes or name in optional:
                        tensors[name] = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} cannot be read: {error}; download or convert the model again") from error
    if "lm_head.weight" not in shapes and len(ends) == len(TIED):
        refuse_untied(folder, ends)
    try:
        check_tensors(tensors, shapes, optional)
    except ShapeError as error:
        raise ConfigError(f"{folder}: {error}; its config.json and weights do not belong together") from error
    refuse_more(folder, names, {**shapes, **optional})
    return tensors


def refuse_more(folder: Path, names: Iterable[str], shapes: Shapes, ignored: Sequence[str] = ()) -> None:
    """Raises ConfigError where a layer in the files has a map, norm or bias that the net has not, or there are more layers. ignored: patterns of names that
    the net's family knows and leaves out."""
    stems = {found.group(1, 2) for found in map(_IN_LAYER.fullmatch, shapes) if found}
    for name in names:
        found = None if name in shapes else _IN_LAYER.fullmatch(name)
        if found and found.group(1, 2) in stems and not any(re.search(pattern, name) for pattern in ignored):
            raise ConfigError(
                f"{folder} has a weight {name!r}, and the net that its config.json describes has not: they do not belong together"
            )


def refuse_untied(folder: Path, files: Mapping[str, Path]) -> None:
    """Raises ConfigError unless the tensors of these names, which config.json ties to one, are equal: loading would keep one of them
    and lose what the other had learned (T082). files: where each stands."""
    with ExitStack() as stack:
        opened = {name: stack.enter_context(safe_open(path, framework="pt")) for name, path in files.items()}
        slices = [file.get_slice(name) for name, file in opened.items()]
        if _all_equal(slices):
            return
    raise ConfigError(
        f"{folder}: {' and '.join(sorted(files))} differ, but config.json ties them to one (tie_word_embeddings), so a part of the model "
        "would be lost; set tie_word_embeddings to false in its config.json, or save the model again"
    )


def _all_equal(slices: list[Any]) -> bool:
    """Of tensors in files, some rows at a time."""
    shape = slices[0].get_shape()
    if any(each.get_shape() != shape for each in slices):
        return False
    rows = max(1, _COMPARED_BYTES // (8 * max(1, shape[1])))
    for start in range(0, shape[0], rows):
        first, *others = (each[start : start + rows] for each in slices)
        if not all(torch.equal(first, other) for other in others):
            return False
    return True


Read = Callable[[str, tuple[slice, ...]], Tensor]
"""(name on disk, a slice for each of its axes) -> that much of it, in the file's dtype; it lives as long as the file is open."""


class WeightFiles:
    """The tensors of a model folder, unread: name -> shape in `shapes`."""

    def __init__(self, folder: Path, name: str = "") -> None:
        """name: of the one file that has them, where it is not called as a model's. Raises ConfigError where there are no safetensors files, or one
        cannot be opened."""
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._kinds: dict[str, str] = {}
        self._paths: dict[str, Path] = {}
        for path in [folder / name] if name else weight_files(folder):
            try:
                with safe_open(path, framework="pt") as file:
                    for tensor in file.keys():  # noqa: SIM118  (no mapping)
                        unread = file.get_slice(tensor)
                        self.shapes[tensor], self._kinds[tensor] = tuple(unread.get_shape()), unread.get_dtype()
                        self._paths[tensor] = path
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{path} cannot be read: {error}; download or convert the model again") from error

    def check(self, shapes: Shapes, ignored: Sequence[str] = ()) -> None:
        """Raises ConfigError unless every name of `shapes` is there, in its shape, as plain floating-point numbers, and as `refuse_more`."""
        for name, shape in shapes.items():
            if name not in self.shapes:
                raise ConfigError(
                    f"{self.folder} has no weight {name!r}: the checkpoint is incomplete, or its config.json is of another model"
                )
            if self.shapes[name] != shape:
                raise ConfigError(
                    f"{self.folder}: {name} has shape {self.shapes[name]}, the net needs {shape}; its config.json and weights do not "
                    "belong together"
                )
            if self._kinds[name] not in _PLAIN:
                raise ConfigError(
                    f"{self.folder}: {name} holds {self._kinds[name]}, and a net is trained from floating-point weights; take the model "
                    "as it was before it was quantised"
                )
        refuse_more(self.folder, self.shapes, shapes, ignored)

    def refuse_untied(self, names: tuple[str, ...]) -> None:
        """Raises ConfigError where more than one of the names, which config.json ties to one, is there and they differ (T082)."""
        there = {name: self._paths[name] for name in names if name in self._paths}
        if len(there) > 1:
            refuse_untied(self.folder, there)

    @contextmanager
    def opened(self) -> Iterator[Read]:
        """Files are opened when they are needed and closed at the end: while they are, what was read of them takes memory."""
        with ExitStack() as stack:
            files: dict[Path, Any] = {}

            def read(name: str, region: tuple[slice, ...]) -> Tensor:
                path = self._paths[name]
                if path not in files:
                    files[path] = stack.enter_context(safe_open(path, framework="pt"))
                part: Tensor = files[path].get_slice(name)[region] if region else files[path].get_tensor(name)
                return part

            yield read


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


def check_tensors(
    tensors: Mapping[str, Tensor], shapes: Shapes, optional: Shapes = _NONE, *, finite: bool = False
) -> None:
    """Raises ShapeError unless exactly the names of `shapes` are there, and of `optional` some, in their shapes (and without NaN or infinity).

    A redundant lm_head.weight beside tied embeddings is let through: whoever fuses the tensors does not read it."""
    missing = sorted(shapes.keys() - tensors.keys())
    shapes = {**shapes, **{name: shape for name, shape in optional.items() if name in tensors}}
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
