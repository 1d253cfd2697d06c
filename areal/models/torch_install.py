"""Whether the torch of this environment can be used, told from package metadata alone: nothing is imported.

    check_torch()        # ConfigError: one sentence with the pip line that mends it

`pip install` over an environment that already holds torch and torchvision may leave an older torch (with --no-deps), or a
torchvision built for the former torch; transformers imports torchvision where it finds it, and dies in the middle of a
load. Called by train.py before a process starts, and by the rank and the native server, which also start alone.
"""

from __future__ import annotations

import re
from importlib import metadata

from areal.base.errors import ConfigError

TESTED = "2.13.0"
"""The torch that pyproject.toml pins (a test keeps them equal): older ones are refused, newer ones are the user's choice."""

_NEEDS_TORCH = re.compile(r"torch\s*\(?==\s*([0-9.]+)")


def check_torch() -> None:
    """Raises ConfigError for a missing or older torch, and for a torchvision that was built for another one."""
    torch = _installed("torch")
    if torch is None:
        raise ConfigError(f"torch is not installed; run: pip install 'torch=={TESTED}'")
    if _numbers(torch) < _numbers(TESTED):
        raise ConfigError(
            f"torch {torch} is installed, areal is tested from torch {TESTED} on; run: pip install --upgrade 'torch=={TESTED}'"
        )
    torchvision = _installed("torchvision")
    built_for = _torch_of_torchvision() if torchvision is not None else None
    if built_for is not None and _numbers(built_for) != _numbers(torch):
        raise ConfigError(
            f"torchvision {torchvision} was built for torch {built_for}, but torch {torch} is installed, so loading a model would "
            "fail; areal does not need it, run: pip uninstall -y torchvision (or: pip install --upgrade torchvision)"
        )


def _torch_of_torchvision() -> str | None:
    found = filter(None, map(_NEEDS_TORCH.match, metadata.requires("torchvision") or ()))
    return next((need[1] for need in found), None)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13, 0); what follows the numbers says how it was built, not which release it is."""
    found = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
