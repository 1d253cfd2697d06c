"""An environment with another torch or torchvision gets one sentence; the environments are real metadata folders."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from areal.models.torch_install import TESTED

ROOT = Path(__file__).resolve().parents[2]


def check_in(folder: Path, **packages: str) -> subprocess.CompletedProcess[str]:
    """Run the check in a process that finds these packages first. "version" or "version needs"."""
    for name, said in packages.items():
        version, _, needs = said.partition(" ")
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {needs}"] if needs else []
        (info / "METADATA").write_text("\n".join(lines) + "\n")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from areal.base.errors import ConfigError\n"
        "from areal.models.torch_install import check_torch\n"
        "try: check_torch()\n"
        "except ConfigError as error: print(error)\n"
        "assert 'torch' not in sys.modules\n"
    )
    return subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True)


@pytest.mark.parametrize("version", ["2.4.1", "2.4.1+cu121", "2.9.0"])
def test_an_older_torch_is_one_sentence_with_the_line_that_mends_it(tmp_path: Path, version: str) -> None:
    said = check_in(tmp_path, torch=version).stdout
    assert said == (
        f"torch {version} is installed, areal is tested from torch {TESTED} on; "
        f"run: pip install --upgrade 'torch=={TESTED}'\n"
    )


def test_a_torchvision_of_another_torch_is_named(tmp_path: Path) -> None:
    said = check_in(tmp_path, torch=f"{TESTED}+cpu", torchvision="0.19.1 torch==2.4.1").stdout
    assert said.startswith(f"torchvision 0.19.1 was built for torch 2.4.1, but torch {TESTED}+cpu is installed")
    assert "pip uninstall -y torchvision" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "packages",
    [
        {"torch": TESTED},
        {"torch": f"{TESTED}+cpu", "torchvision": f"0.28.0 torch=={TESTED}"},
        {"torch": "3.0.1", "torchvision": "1.0.0 torch==3.0.1"},
    ],
)
def test_what_fits_passes_in_silence(tmp_path: Path, packages: dict[str, str]) -> None:
    assert check_in(tmp_path, **packages).stdout == ""


def test_the_tested_torch_is_the_one_that_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch=={TESTED}" in project["dependencies"]
