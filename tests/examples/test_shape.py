"""What every example has: a README of one screen whose commands name files that exist, and a short configuration that can start."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from areal.config.load import resolve
from areal.config.run import RunConfig
from areal.config.startable import why_not

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ("claude_code", "langchain", "math_agent", "openclaw", "own_agent")
SCREEN = 45  # lines


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_readme_of_one_screen_and_a_short_configuration(name: str) -> None:
    folder = ROOT / "examples" / name
    assert len((folder / "README.md").read_text().splitlines()) <= SCREEN
    assert len((folder / "config.yaml").read_text().splitlines()) <= 40
    for train in folder.glob("train.py"):
        assert len(train.read_text().splitlines()) <= 25


@pytest.mark.parametrize("name", EXAMPLES)
def test_its_configuration_can_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    resolved = resolve(ROOT / "examples" / name / "config.yaml", [])
    assert hindrances(resolved.config) == []
    assert resolved.notes == ()


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_commands_and_links_of_its_readme_lead_somewhere(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    folder = ROOT / "examples" / name
    text = (folder / "README.md").read_text()
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    named = re.findall(r"examples/[\w./]+\.\w+", blocks)
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []
    for module in re.findall(r"(examples(?:\.\w+)+)", blocks):
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists(), module
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert (folder / link).exists(), link
    for command in re.findall(r"areal train --config (\S+)(.*)", blocks):
        overrides = re.findall(r"[\w.]+=\S+", command[1])
        assert hindrances(resolve(ROOT / command[0], overrides).config) == [], command


def hindrances(config: RunConfig) -> list[str]:
    """What keeps it from starting, but for a program that this machine lacks: its sentence is a line that installs it."""
    return [reason for reason in why_not(config) if not re.search(r" needs \S+ on PATH: npm install -g \S+$", reason)]
