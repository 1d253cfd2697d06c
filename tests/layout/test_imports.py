"""Rules 1 and 2: imports go down, and the front door is light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Where tensors live. Everything else imports without torch (models/fetch and models/bundled too).
TORCH_FOLDERS = {"engine", "weights", "algorithms", "models"}
# Advantages are computed on the controller, by the algorithms' own tensor maths.
TORCH_MODULES = ("areal.inference.native",)
LIGHT_MODULES = (
    "areal.train",
    "areal.doctor",
    "areal.replay",
    "areal.models.fetch",
    "areal.models.tokenizer",
    "areal.models.torch_install",
    "areal.__main__",
    "areal.tools.plan.report",
    "areal.tools.plan.search",
    "areal.tools.plot_metrics",
    "areal.tools.status",
)
HEAVY_PACKAGES = ("torch", "transformers", "matplotlib", "safetensors", "gguf")


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; write the whole name"
            yield node.lineno, str(node.module)
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def _folder(name: str, order: tuple[str, ...]) -> str | None:
    parts = name.split(".")
    if parts[0] != "areal" or len(parts) < 2:
        return None
    return parts[1] if parts[1] in order else "top"


def test_imports_go_down(modules: list[Any], order: tuple[str, ...]) -> None:
    wrong = []
    for module in modules:
        for line, name in _imports(module.tree):
            target = _folder(name, order)
            if name == "areal.__version__" or target is None:
                continue
            if order.index(target) < order.index(module.folder):
                wrong.append(f"{module}:{line} imports {name}, but {target} stands above {module.folder}")
    assert not wrong, "\n".join(wrong)


def test_every_folder_has_its_place_and_the_document_says_the_same_order(
    modules: list[Any], order: tuple[str, ...]
) -> None:
    assert {module.folder for module in modules} <= set(order)
    text = (ROOT / "docs" / "architecture.md").read_text()
    found = re.search(r"`train · doctor · replay · assemble · launch · __main__`((?:\s*>\s*`\w+`)+)", text)
    assert found, "docs/architecture.md no longer shows the folder order"
    assert tuple(re.findall(r"`(\w+)`", found[1])) == order[1:]


def test_only_the_tensor_folders_import_torch(modules: list[Any]) -> None:
    wrong = []
    for module in modules:
        allowed = module.folder in TORCH_FOLDERS or module.name.startswith(TORCH_MODULES)
        top_level = ast.Module([node for node in module.tree.body if not isinstance(node, ast.If)], [])
        for line, name in _imports(top_level):
            if name.split(".")[0] == "torch" and not allowed:
                wrong.append(f"{module}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def _light_modules(modules: list[Any]) -> list[str]:
    light = [module.name for module in modules if module.folder in {"base", "config", "web", "chat", "store", "proxy"}]
    light += [module.name for module in modules if module.folder in {"gateway", "cluster"}]
    light += [m.name for m in modules if m.folder == "inference" and not m.name.startswith("areal.inference.native")]
    light += [m.name for m in modules if m.name in LIGHT_MODULES]
    return [name for name in light if not name.endswith(".__main__")]


def test_the_front_door_is_light(modules: list[Any]) -> None:
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = [each for each in {HEAVY_PACKAGES!r} if each in sys.modules]\n"
        "    if heavy: sys.exit(f'importing {name} imports {heavy}')\n"
    )
    for names in (["areal"], _light_modules(modules)):
        done = subprocess.run([sys.executable, "-c", program, *names], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["train", "--help"], ["train", "--dry-run"]])
def test_the_command_answers_without_torch(words: list[str]) -> None:
    program = (
        "import runpy, sys\n"
        "sys.argv = ['areal', *sys.argv[1:]]\n"
        "try: runpy.run_module('areal', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        f"assert not [each for each in {HEAVY_PACKAGES!r} if each in sys.modules]\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
