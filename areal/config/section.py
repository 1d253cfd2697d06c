"""The base of every config section: frozen, unknown keys refused, every field documented with unit and advice."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One block of the YAML tree. The loader (config/load.py) turns pydantic's errors into sentences with key paths."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
