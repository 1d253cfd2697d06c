"""What the layout rules look at: every module of areal, parsed once, and the order of the folders."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "areal"

# A folder imports only from folders further down. The first entry stands for the modules at the top of the package.
ORDER = (
    "top",
    "tools",
    "dashboard",
    "rollout",
    "gateway",
    "proxy",
    "store",
    "chat",
    "inference",
    "engine",
    "cluster",
    "weights",
    "models",
    "algorithms",
    "web",
    "config",
    "base",
)


@dataclass(frozen=True)
class Module:
    """One file of the package. folder: its place in ORDER; name: dotted; tree: parsed."""

    path: Path
    folder: str
    name: str
    text: str
    tree: ast.Module

    def __str__(self) -> str:
        return str(self.path.relative_to(ROOT))


def _module(path: Path) -> Module:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    name = ".".join(("areal", *(part for part in parts if part != "__init__")))
    text = path.read_text()
    return Module(path, parts[0] if len(parts) > 1 else "top", name, text, ast.parse(text, str(path)))


@pytest.fixture(scope="session")
def modules() -> list[Module]:
    return [_module(path) for path in sorted(PACKAGE.rglob("*.py"))]


@pytest.fixture(scope="session")
def order() -> tuple[str, ...]:
    return ORDER
