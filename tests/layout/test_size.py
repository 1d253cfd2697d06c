"""Rule 4: small by the tail. Files, functions and classes have a ceiling, and no folder of left-overs exists."""

from __future__ import annotations

import ast
from typing import Any

FILE_LINES, FUNCTION_LINES, PUBLIC_METHODS = 400, 60, 12
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "experimental", "v2", "legacy", "compat"}


def test_files_are_small(modules: list[Any]) -> None:
    wrong = [f"{module}: {lines} lines" for module in modules if (lines := module.text.count("\n")) > FILE_LINES]
    assert not wrong, "give it a second noun: " + ", ".join(wrong)


def test_functions_are_small(modules: list[Any]) -> None:
    wrong = []
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES:
                    wrong.append(f"{module}:{node.lineno} {node.name}: {lines} lines")
    assert not wrong, "\n".join(wrong)


def test_classes_have_few_public_methods(modules: list[Any]) -> None:
    wrong = []
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
                public = [each.name for each in methods if not each.name.startswith("_")]
                if len(public) > PUBLIC_METHODS:
                    wrong.append(f"{module}:{node.lineno} {node.name}: {len(public)} public methods")
    assert not wrong, "\n".join(wrong)


def test_no_folder_or_file_of_left_overs(modules: list[Any]) -> None:
    wrong = []
    for module in modules:
        for part in module.name.split("."):
            words = set(part.split("_"))
            if words & FORBIDDEN_NAMES:
                wrong.append(str(module))
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_is(modules: list[Any]) -> None:
    wrong = [str(module) for module in modules if module.text.strip() and not ast.get_docstring(module.tree)]
    assert not wrong, "\n".join(wrong)
