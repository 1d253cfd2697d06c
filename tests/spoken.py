"""Every text of this repository's programs as it stands in their source, `…` where a value is filled in."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GUIDE = ROOT / "areal" / "base" / "guide"  # says what others say


@cache
def spoken() -> tuple[str, ...]:
    """Texts of areal/, examples/ and scripts/; of shell scripts, whole files."""
    files = [path for folder in ("areal", "examples", "scripts") for path in sorted((ROOT / folder).rglob("*.py"))]
    texts = [text for path in files if path.parent != GUIDE for text in _texts(ast.parse(path.read_text("utf-8")))]
    shell = [re.sub(r"\$\{?\w+\}?", "…", path.read_text("utf-8")) for path in sorted((ROOT / "scripts").glob("*.sh"))]
    return tuple(texts + shell)


def _texts(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr | ast.Constant | ast.BinOp) and (text := _text(node)):
            yield text


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return ""
