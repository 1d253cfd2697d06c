"""weights/: every transfer of the table keeps the same promises. Real files; the full medium is a real full tmpfs."""

from __future__ import annotations

import errno
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file

from areal.base.errors import BackendError, ConfigError, ShapeError, WeightsRefused
from areal.config.run import TransferName
from areal.weights import TRANSFERS, Sink, Source, sink, source
from areal.weights.disk import DiskSink, DiskSource
from areal.weights.shared_memory import FOLDER, SharedMemorySource, remove_leftovers, run_prefix

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="needs /dev/shm")


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.embed_tokens.weight": torch.randn(300, 64, generator=generator),
        "odd": torch.randn(3, generator=generator).to(torch.bfloat16),
        "after.odd": torch.randn(5, 2, generator=generator),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "counts": torch.arange(7),
        "flag": torch.tensor([True, False, True]),
        "not.contiguous": torch.randn(20, 30, generator=generator).t(),
        'läyer "quoted"': torch.ones(2),
    }


@pytest.fixture(params=list(TRANSFERS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(name: str, tmp_path: Path) -> Iterator[tuple[Source, Sink]]:
    writer = source(name, tmp_path)
    yield writer, sink(name, tmp_path)
    writer.close()


def path_of(manifest: dict[str, Any]) -> Path:
    return Path(manifest["path"]) / manifest["files"][0]["name"]


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(expected)
    for key, tensor in expected.items():
        assert got[key].dtype == tensor.dtype
        assert got[key].shape == tensor.shape
        assert torch.equal(got[key], tensor), key


def test_config_and_table_agree() -> None:
    assert set(get_args(TransferName)) == set(TRANSFERS)


def test_an_unknown_transfer_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shared_memory, disk, delta"):
        source("rdma", tmp_path)
    with pytest.raises(ConfigError, match="rdma"):
        sink("rdma", tmp_path)


def test_round_trip_is_bit_equal_and_the_manifest_is_json(pair: tuple[Source, Sink]) -> None:
    manifest = pair[0].publish(weights().items(), 3)
    manifest = json.loads(json.dumps(manifest))
    assert manifest["version"] == 3
    assert_equal(pair[1].receive(manifest), weights())


def test_the_file_is_ordinary_safetensors_of_mode_0600(pair: tuple[Source, Sink]) -> None:
    path = path_of(pair[0].publish(weights().items(), 1))
    assert path.stat().st_mode & 0o777 == 0o600
    plain = load_file(path)
    assert all(torch.equal(plain[key], tensor) for key, tensor in weights().items())


def test_received_tensors_are_mapped_private_and_outlive_their_source(
    pair: tuple[Source, Sink], name: str, tmp_path: Path
) -> None:
    manifest = pair[0].publish(weights().items(), 1)
    first, second = pair[1].receive(manifest), pair[1].receive(manifest)
    first["scalar"].fill_(9.0)
    assert second["scalar"] == 2.5
    pair[0].close()
    gc.collect()
    assert not path_of(manifest).exists()
    assert torch.equal(second["model.embed_tokens.weight"], weights()["model.embed_tokens.weight"])
    with pytest.raises(BackendError, match="publish"):
        sink(name, tmp_path).receive(manifest)


def test_retire_frees_that_version_only(pair: tuple[Source, Sink], name: str) -> None:
    if name == "delta":
        pytest.skip("a version stays while others build on it: test_delta.py")
    manifests = [pair[0].publish(weights(version).items(), version) for version in (1, 11, 2)]
    pair[0].retire(1)
    pair[0].retire(77)
    assert [path_of(manifest).exists() for manifest in manifests] == [False, True, True]
    assert_equal(pair[1].receive(manifests[1]), weights(11))


def test_the_same_label_again_replaces_it(pair: tuple[Source, Sink]) -> None:
    old = pair[0].publish(weights(1).items(), 5)
    new = pair[0].publish(weights(2).items(), 5)
    assert_equal(pair[1].receive(new), weights(2))
    with pytest.raises(BackendError, match="checksum"):
        pair[1].receive(old)


def test_T082_a_tied_head_is_written_once(pair: tuple[Source, Sink]) -> None:
    embedding = torch.randn(10, 4)
    head = embedding.detach()  # another tensor object, the same memory: what state_dict() yields
    got = pair[1].receive(pair[0].publish([("model.embed_tokens.weight", embedding), ("lm_head.weight", head)], 1))
    assert list(got) == ["model.embed_tokens.weight"]


def test_T082_equal_but_separate_tensors_are_both_written(pair: tuple[Source, Sink]) -> None:
    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(50):  # each is freed before the next is made, so addresses repeat
            yield f"layer.{index}", torch.full((64,), float(index))

    parts = torch.arange(8.0)
    got = pair[1].receive(pair[0].publish([*gathered(), ("q", parts[:4]), ("k", parts[4:])], 1))
    assert len(got) == 52
    streamed = pair[1].receive(pair[0].publish(gathered(), 2))
    assert [tensor[0].item() for tensor in streamed.values()] == [float(index) for index in range(50)]


@pytest.mark.parametrize("where", ["header", "first", "last"])
def test_one_altered_bit_is_refused(pair: tuple[Source, Sink], where: str) -> None:
    manifest = pair[0].publish(weights().items(), 1)
    path = path_of(manifest)
    offset = {"header": 20, "first": (1 << 20) + 8, "last": path.stat().st_size - 1}[where]
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(BackendError, match="checksum" if where == "header" else "differs"):
        pair[1].receive(manifest)


def test_pages_that_have_changed_places_are_refused(pair: tuple[Source, Sink]) -> None:
    manifest = pair[0].publish([("w", torch.arange(100_000, dtype=torch.float32))], 1)
    with path_of(manifest).open("r+b") as file:
        file.seek((1 << 20) + 8)
        one, two = file.read(4096), file.read(4096)
        file.seek((1 << 20) + 8)
        file.write(two + one)
    with pytest.raises(WeightsRefused, match="tensor w differs"):
        pair[1].receive(manifest)


@pytest.mark.parametrize("change", [-1, -1000, 1])
def test_a_truncated_or_longer_file_is_refused(pair: tuple[Source, Sink], change: int) -> None:
    manifest = pair[0].publish(weights().items(), 1)
    os.truncate(path_of(manifest), path_of(manifest).stat().st_size + change)
    with pytest.raises(BackendError, match="bytes, the manifest says"):
        pair[1].receive(manifest)


def test_T065_a_publish_that_fails_half_way_leaves_the_former_version(
    pair: tuple[Source, Sink], tmp_path: Path
) -> None:
    manifest = pair[0].publish(weights().items(), 1)
    folder = Path(manifest["path"])

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(1000)
        raise RuntimeError("rank lost")

    with pytest.raises(RuntimeError, match="rank lost"):
        pair[0].publish(broken(), 2)
    assert_equal(pair[1].receive(manifest), weights())
    assert (
        not list(folder.parent.rglob("*v2*"))
        if folder != FOLDER
        else not list(folder.glob(f"{run_prefix(tmp_path)}*v2*"))
    )


def test_what_cannot_be_published_is_named(pair: tuple[Source, Sink]) -> None:
    with pytest.raises(ShapeError, match="comes twice"):
        pair[0].publish([("a", torch.ones(1)), ("a", torch.ones(2))], 1)
    with pytest.raises(ShapeError, match="complex"):
        pair[0].publish([("a", torch.ones(1, dtype=torch.complex64))], 1)
    with pytest.raises(ShapeError, match="no tensor"):
        pair[0].publish([], 1)


HOSTILE = ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "model.bin", "x\0y", 5, None]


@pytest.mark.parametrize("hostile", HOSTILE, ids=repr)
def test_T111_a_manifest_cannot_name_other_files(pair: tuple[Source, Sink], hostile: Any) -> None:
    manifest = pair[0].publish(weights().items(), 1)
    manifest["files"][0]["name"] = hostile
    with pytest.raises(BackendError, match="no file of this run"):
        pair[1].receive(manifest)


@pytest.mark.parametrize("hostile", ["/tmp", "/dev/shm/../../etc", "..", "", "/dev/shm/x", 7])
def test_T111_a_manifest_cannot_name_other_folders(pair: tuple[Source, Sink], hostile: Any) -> None:
    manifest = pair[0].publish(weights().items(), 1) | {"path": hostile}
    with pytest.raises(BackendError, match=r"not read|not a manifest"):
        pair[1].receive(manifest)


def test_T111_a_link_in_place_of_the_file_is_not_followed(pair: tuple[Source, Sink], tmp_path: Path) -> None:
    manifest = pair[0].publish(weights().items(), 1)
    path = path_of(manifest)
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(outside)
    with pytest.raises(BackendError, match="cannot be opened"):
        pair[1].receive(manifest)


def test_T111_another_runs_weights_are_not_read(name: str, pair: tuple[Source, Sink], tmp_path: Path) -> None:
    manifest = pair[0].publish(weights().items(), 1)
    with pytest.raises(BackendError, match="not"):
        sink(name, tmp_path / "other").receive(manifest)


class Explosive:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.marker),))


def test_T110_a_pickle_is_never_loaded(pair: tuple[Source, Sink], tmp_path: Path) -> None:
    manifest = pair[0].publish(weights().items(), 1)
    marker = tmp_path / "exploded"
    payload = pickle.dumps(Explosive(marker))
    path = path_of(manifest)
    path.write_bytes(payload.ljust(path.stat().st_size, b"\0"))
    with pytest.raises(BackendError):
        pair[1].receive(manifest)
    assert not marker.exists()


def test_the_wrong_transfer_is_refused(pair: tuple[Source, Sink], name: str, tmp_path: Path) -> None:
    manifest = pair[0].publish(weights().items(), 1)
    other = next(known for known in TRANSFERS if known != name)
    with pytest.raises(BackendError, match=r"same weights\.transfer"):
        sink(other, tmp_path).receive(manifest)
    with pytest.raises(BackendError, match="not a manifest"):
        pair[1].receive({})


def test_large_sets_become_shards_with_an_index(tmp_path: Path) -> None:
    writer = DiskSource(tmp_path, shard_bytes=(1 << 20) + 50_000)
    tensors = weights()
    manifest = writer.publish(tensors.items(), 1)
    assert [entry["name"] for entry in manifest["files"]] == ["model-00001.safetensors", "model-00002.safetensors"]
    assert_equal(DiskSink(tmp_path).receive(manifest), tensors)
    index = json.loads((Path(manifest["path"]) / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors)
    for key, file in index["weight_map"].items():
        assert torch.equal(load_file(Path(manifest["path"]) / file)[key], tensors[key])


def test_a_header_that_is_full_starts_the_next_file(pair: tuple[Source, Sink]) -> None:
    tensors = {f"model.layers.{index}.{'x' * 800}": torch.tensor([float(index)]) for index in range(600)}
    manifest = pair[0].publish(tensors.items(), 1)
    assert len(manifest["files"]) == 2
    assert_equal(pair[1].receive(manifest), tensors)
    pair[0].close()
    assert not path_of(manifest).exists()
    assert not (Path(manifest["path"]) / manifest["files"][1]["name"]).exists()


FULL = """
import sys, torch
from pathlib import Path
from areal.weights import sink, source
from areal.weights.shared_memory import SharedMemorySink, SharedMemorySource
place, kind = Path(sys.argv[1]), sys.argv[2]
there = kind == "shared_memory"
pair = (SharedMemorySource(place, place), SharedMemorySink(place, place)) if there else (source(kind, place), sink(kind, place))
manifest = pair[0].publish([("a", torch.ones(1000))], 1)
try:
    pair[0].publish([("a", torch.ones(1000)), ("b", torch.ones(4_000_000))], 2)
except OSError as error:
    print(error)
assert torch.equal(pair[1].receive(manifest)["a"], torch.ones(1000))
print(sorted(path.name for path in place.rglob("*v2*")))
"""


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounting a small tmpfs needs root")
def test_a_full_medium_is_an_error_with_path_and_remedy(name: str, tmp_path: Path) -> None:
    command = f"mount -t tmpfs -o size=8m none {tmp_path} && exec {sys.executable} -c '{FULL}' {tmp_path} {name}"
    done = subprocess.run(["unshare", "-m", "sh", "-c", command], capture_output=True, text=True, timeout=400)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    said, left = done.stdout.strip().splitlines()
    assert f"[Errno {errno.ENOSPC}]" in said
    assert "version 2" in said
    assert str(tmp_path) in said
    assert "Make room" in said
    assert left == "[]"


PUBLISH = """
import os, sys, time, torch
from pathlib import Path
from areal.weights import source
writer = source("shared_memory", Path(sys.argv[1]))
print(writer.publish([("a", torch.ones(10))], 1)["files"][0]["name"], flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("killed", [True, False])
def test_files_of_dead_runs_are_removed_and_those_of_live_ones_stay(tmp_path: Path, killed: bool) -> None:
    mine = SharedMemorySource(tmp_path / "mine")
    kept = path_of(mine.publish(weights().items(), 1))
    child = subprocess.Popen(
        [sys.executable, "-c", PUBLISH, str(tmp_path / "other")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    other = FOLDER / child.stdout.readline().strip()
    assert other.exists()
    remove_leftovers()
    assert other.exists(), "its source lives"
    if killed:
        child.send_signal(signal.SIGKILL)
    child.communicate()
    assert other.exists() is killed, "a source that exits removes its files by itself"
    remove_leftovers()
    assert not other.exists()
    assert not list(FOLDER.glob(f"{run_prefix(tmp_path / 'other')}*"))
    assert kept.exists()
    mine.close()
    assert not kept.exists()


def test_one_source_per_process_and_run(tmp_path: Path) -> None:
    first = SharedMemorySource(tmp_path)
    with pytest.raises(ConfigError, match="close that source first"):
        SharedMemorySource(tmp_path)
    first.close()
    SharedMemorySource(tmp_path).close()


def test_publishing_does_not_hold_a_second_copy(pair: tuple[Source, Sink]) -> None:
    """The private memory that publishing adds stays far below the 128 MB it writes."""
    tensors = [(f"w{index}", torch.zeros(1_000_000)) for index in range(32)]
    pair[0].publish(tensors[:1], 1)
    before = private_bytes()
    peak = 0

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal peak
        for entry in tensors:
            yield entry
            peak = max(peak, private_bytes() - before)

    pair[0].publish(watched(), 2)
    assert peak < 16_000_000


def private_bytes() -> int:
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(("Private_", "Swap:")))
