"""Rules 6, 8 and 9: names stand once, every key is documented and read, nothing is swallowed, nothing is left for later."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest

from areal.base import errors
from areal.base.errors import ArealError
from areal.config import cluster, objective, rollout
from areal.config.backend_spec import DIMENSIONS, NAMES, RolloutBackend, TrainBackend
from areal.config.keys import keys_of
from areal.config.run import RunConfig, TransferName
from areal.config.supported import REFUSALS

ROOT = Path(__file__).resolve().parents[2]
# Where an error of any kind must not end the process: the HTTP edge (`bugs_as_errors`, which every application uses: a bug is a
# JSON 500 and a trace in the log), the rollout worker (agents are foreign code), the rank loop (the controller has to hear of it).
BROAD_EXCEPT = ["areal.engine.worker", "areal.rollout.agent_runs", "areal.web.app"]
# A library that raises Exception itself: around its one call, and said as ConfigError.
BARE_LIBRARY = ["areal.models.tokenizer"]
# The user's own Python, which may raise anything while it is loaded: said as ConfigError.
OWN_CODE = ["areal.base.own_code"]
# What configures how other keys are read and so needs no reader of its own outside areal/config.
READ_WHILE_LOADING = {"rollout.reward.prompt_path", "total_train_epochs"}
NAMED_FILE = re.compile(r"(?<![\w./{-])(?:[a-z_]+/)*[a-z_]+\.(?:py|md)\b")
LEFT_FOR_LATER = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|raise NotImplementedError")


def _broad(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = {kind.id for kind in kinds if isinstance(kind, ast.Name)}
    last = handler.body[-1]
    goes_on_up = isinstance(last, ast.Raise) and last.exc is None  # cleaning up is no catch
    return (handler.type is None or bool(names & {"Exception", "BaseException"})) and not goes_on_up


def test_errors_are_caught_broadly_in_three_places_only(modules: list[Any]) -> None:
    found = {
        f"{module}:{node.lineno}": module.name
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ExceptHandler) and _broad(node)
    }
    assert sorted(found.values()) == sorted(BROAD_EXCEPT + BARE_LIBRARY + OWN_CODE), "broad excepts at " + ", ".join(
        found
    )


def test_nothing_is_left_for_later(modules: list[Any]) -> None:
    wrong = []
    for module in modules:
        for number, line in enumerate(module.text.splitlines(), 1):
            if LEFT_FOR_LATER.search(line):
                wrong.append(f"{module}:{number} {line.strip()}")
    assert not wrong, "\n".join(wrong)


def test_files_that_are_named_exist(modules: list[Any]) -> None:
    """In docstrings, comments and documents: by a path's end, or by a bare name."""
    files = {f"/{path.relative_to(ROOT)}" for kind in ("py", "md") for path in ROOT.glob(f"*/**/*.{kind}")}
    files |= {f"/{path.name}" for kind in ("py", "md") for path in ROOT.glob(f"*.{kind}")}
    texts = {str(module): module.text for module in modules}
    texts |= {str(path.relative_to(ROOT)): path.read_text() for path in (*ROOT.glob("docs/*.md"), ROOT / "README.md")}
    named = {(where, found[0]) for where, text in texts.items() for found in NAMED_FILE.finditer(text)}
    ends = {file[at:] for file in files for at, sign in enumerate(file) if sign == "/"}
    assert [f"{where}: {name}" for where, name in sorted(named) if f"/{name}" not in ends] == []


def test_errors_stand_in_one_tree_and_are_documented() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert all(issubclass(kind, ArealError) for kind in kinds)
    assert all(kind.__doc__ for kind in kinds)
    assert all(kind.__name__ in (errors.__doc__ or "") for kind in kinds)


def test_every_key_is_documented() -> None:
    wrong = [path for path, key in keys_of(RunConfig).items() if not key.description]
    assert not wrong, "a docstring with unit and advice is missing at " + ", ".join(wrong)


def test_every_key_has_a_reader_or_is_refused(modules: list[Any]) -> None:
    readers = "\n".join(module.text for module in modules if module.folder not in ("config", "base"))
    refused = {refusal.path for refusal in REFUSALS}
    wrong = []
    for path in keys_of(RunConfig):
        leaf = path.rpartition(".")[2]
        above = {path.rsplit(".", n)[0] for n in range(path.count(".") + 1)}
        if not re.search(rf"[.\"']{leaf}\b", readers) and not above & (refused | READ_WHILE_LOADING):
            wrong.append(path)
    assert not wrong, "nothing reads " + ", ".join(wrong)


def test_the_names_of_a_choice_are_the_keys_of_its_table() -> None:
    pytest.importorskip("torch")
    from areal.algorithms import ALGORITHMS
    from areal.cluster import SCHEDULERS
    from areal.inference import BACKENDS
    from areal.weights import TRANSFERS

    refused = {"scheduler.type": {"slurm", "ray"}, "rollout.backend": {"sglang", "vllm"}}
    assert set(get_args(objective.AlgorithmName)) == {"auto", *ALGORITHMS}
    assert set(get_args(cluster.SchedulerName)) - refused["scheduler.type"] == set(SCHEDULERS)
    assert set(get_args(RolloutBackend)) - refused["rollout.backend"] == set(BACKENDS)
    assert set(get_args(TransferName)) == set(TRANSFERS)


def test_backend_names_agree() -> None:
    assert set(DIMENSIONS) == {*get_args(TrainBackend), *get_args(RolloutBackend)}
    assert {"train": get_args(TrainBackend), "rollout": get_args(RolloutBackend)} == NAMES
    assert get_args(rollout.StylesOfExport) == ("individual", "concat")


def test_requirements_are_the_dependencies_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    assert [line for line in lines if line and not line.startswith("#")] == project["dependencies"]
    assert any(line.startswith("openai") for line in lines)
    assert project["requires-python"].startswith(">=3.11")
