"""The plain way back from what lies on disk to a parameter, whole and at once: what reading it in pieces is compared with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from areal.models.hf_names import Parts


def from_disk(parts: Parts, shape: tuple[int, ...], read: Callable[[str], Tensor]) -> Tensor:
    """The parameter that `to_disk` came from, in the dtype of its first part."""
    parameter: Tensor | None = None
    for name, place in parts.items():
        part = read(name)
        if not place:
            return part
        parameter = torch.empty(shape, dtype=part.dtype) if parameter is None else parameter
        parameter[place] = part
    assert parameter is not None
    return parameter
