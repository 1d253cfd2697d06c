"""weights/delta.py: a version that came as differences is bit-equal to one that came whole, and nothing that is wrong is taken."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from areal.base.errors import ShapeError, WeightsRefused
from areal.weights.delta import DeltaSink, DeltaSource
from areal.weights.difference import BLOCK, applied, difference
from tests.weights.test_transfer import assert_equal

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The copies of this test, and nobody else's."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Iterator[DeltaSource]:
    made = DeltaSource(tmp_path)
    yield made
    made.close()


def weights(step: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """As after so many small training steps: some numbers have moved, one tensor has not."""
    generator = torch.Generator().manual_seed(7)
    large = torch.randn(1000, 1500, generator=generator)
    for _ in range(step):
        large += 1e-3 * large.abs() * (torch.rand(large.shape, generator=generator) < 0.05)
    return {
        "large": large.to(dtype),
        "not.contiguous": large[:20, :30].t().to(dtype),
        "still": torch.arange(3000, dtype=torch.float32),
        "odd": torch.tensor([step, 1, 2], dtype=torch.int8),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(float(step)),
    }


def read_bytes(manifest: dict[str, Any]) -> int:
    """Of this version alone."""
    return sum(int(entry["bytes"]) for entry in manifest["files"])


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def file_of(manifest: dict[str, Any]) -> Path:
    return Path(manifest["path"]) / manifest["files"][0]["name"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", [0.0, 1e-6, 0.01, 1.0])
def test_what_changed_gives_the_same_bits(dtype: torch.dtype, share: float) -> None:
    generator = torch.Generator().manual_seed(1)
    former = torch.randn(3, BLOCK // 2, generator=generator).to(dtype)
    moved = torch.rand(former.shape, generator=generator) < share
    tensor = torch.where(moved, former * (1 + 2.0**-7), former)
    tensor[0, 0], tensor[2, -1] = float("nan"), -0.0
    record = difference("w", former, tensor)
    got = applied(former, record)
    assert got.dtype == dtype
    assert torch.equal(got.view(torch.uint8), tensor.view(torch.uint8))
    assert len(record) < {1.0: 0.75}.get(share, 0.05) * tensor.numel() * tensor.element_size() + 300


def test_what_cannot_shrink_goes_whole_and_needs_no_former() -> None:
    generator = torch.Generator().manual_seed(1)
    former, tensor = (torch.randint(-(2**31), 2**31 - 1, (5000,), generator=generator) for _ in range(2))
    record = difference("w", former.int(), tensor.int())
    assert len(record) < 20_000 + 300
    assert torch.equal(applied(None, record), tensor.int())


@pytest.mark.parametrize("former", [None, torch.zeros(999), torch.zeros(1000, dtype=torch.int32), torch.ones(1000)])
def test_another_base_is_refused(former: torch.Tensor | None) -> None:
    record = difference("w", torch.zeros(1000), torch.eye(1000)[7])
    with pytest.raises(WeightsRefused, match="whole weights are needed"):
        applied(former, record)


@pytest.mark.parametrize("place", range(0, 150, 7))
def test_a_damaged_difference_is_refused_wherever_it_is_damaged(place: int) -> None:
    former = torch.zeros(2000)
    record = difference("w", former, torch.where(torch.arange(2000) % 7 == 0, 1.5, 0.0))
    record[place % len(record)] ^= 0x11
    with pytest.raises(WeightsRefused):
        applied(former, record)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_twins_what_comes_as_differences_is_what_comes_whole(
    source: DeltaSource, tmp_path: Path, dtype: torch.dtype
) -> None:
    follower = DeltaSink(tmp_path)
    for version in range(5):
        expected = weights(version, dtype)
        manifest = json.loads(json.dumps(source.publish(expected.items(), version)))
        assert_equal(follower.receive(manifest), expected)
        assert_equal(DeltaSink(tmp_path).receive(manifest), expected)  # one that comes now
        source.retire(version)


def test_few_changes_are_few_bytes(source: DeltaSource) -> None:
    first, second = (source.publish(weights(version).items(), version) for version in (0, 1))
    assert [link["version"] for link in second["former"]] == [0]
    header = 8 + (1 << 20)
    assert read_bytes(second) - header < 0.1 * (read_bytes(first) - header)


def test_a_server_reads_only_what_it_lacks(source: DeltaSource, tmp_path: Path) -> None:
    follower = DeltaSink(tmp_path)
    manifests = [source.publish(weights(version).items(), version) for version in range(4)]
    assert_equal(follower.receive(manifests[1]), weights(1))
    for manifest in manifests[:2]:
        shutil.rmtree(manifest["path"])
    assert_equal(follower.receive(manifests[3]), weights(3))  # two at once
    assert_equal(follower.receive(manifests[3]), weights(3))  # again: nothing
    with pytest.raises(WeightsRefused, match="publish"):
        DeltaSink(tmp_path).receive(manifests[3])


def test_what_was_received_may_be_changed_without_harm(source: DeltaSource, tmp_path: Path) -> None:
    follower = DeltaSink(tmp_path)
    for tensor in follower.receive(source.publish(weights(0).items(), 0)).values():
        tensor.zero_()
    assert_equal(follower.receive(source.publish(weights(1).items(), 1)), weights(1))


def test_names_come_and_go(source: DeltaSource, tmp_path: Path) -> None:
    follower, changed = DeltaSink(tmp_path), weights(1)
    del changed["still"]
    changed |= {"new": torch.ones(5), "odd": torch.ones(2, 2)}
    for version, expected in enumerate((weights(0), changed, weights(2))):
        manifest = source.publish(expected.items(), version)
        assert_equal(follower.receive(manifest), expected)
        assert_equal(DeltaSink(tmp_path).receive(manifest), expected)


def test_a_damaged_copy_is_mended_from_the_whole_version(source: DeltaSource, tmp_path: Path, temporary: Path) -> None:
    follower = DeltaSink(tmp_path)
    follower.receive(source.publish(weights(0).items(), 0))
    manifest = source.publish(weights(1).items(), 1)
    for path in temporary.rglob("*.safetensors"):
        flip(path, path.stat().st_size - 1)
    assert_equal(follower.receive(manifest), weights(1))
    again = source.publish(weights(2).items(), 2)
    assert again["former"] == [], "the source's copy was damaged, too: the next version is whole"
    assert_equal(follower.receive(again), weights(2))


@pytest.mark.parametrize("where", [20, (1 << 20) + 8, -1])
def test_one_altered_bit_of_a_difference_is_refused_and_what_is_held_stays(
    source: DeltaSource, tmp_path: Path, where: int
) -> None:
    follower = DeltaSink(tmp_path)
    first = source.publish(weights(0).items(), 0)
    follower.receive(first)
    second = source.publish(weights(1).items(), 1)
    path = file_of(second)
    flip(path, where if where > 0 else path.stat().st_size + where)
    with pytest.raises(WeightsRefused, match=r"checksum|differs"):
        follower.receive(second)
    assert_equal(follower.receive(first), weights(0))
    flip(path, where if where > 0 else path.stat().st_size + where)
    assert_equal(follower.receive(second), weights(1))


def test_differences_to_another_base_of_the_same_label_are_not_applied(tmp_path: Path) -> None:
    follower, one = DeltaSink(tmp_path), DeltaSource(tmp_path)
    follower.receive(one.publish(weights(3).items(), 0))
    one.close()
    other = DeltaSource(tmp_path)
    other.publish(weights(0).items(), 0)
    assert_equal(follower.receive(other.publish(weights(1).items(), 1)), weights(1))
    third = DeltaSource(tmp_path)
    assert_equal(follower.receive(third.publish(weights(5).items(), 1)), weights(5))
    third.close()
    other.close()


def test_the_next_is_whole_once_differences_took_as_much(source: DeltaSource, tmp_path: Path) -> None:
    follower, chains = DeltaSink(tmp_path), []
    for version in range(6):
        generator = torch.Generator().manual_seed(version)
        expected = {"w": torch.randint(-(2**31), 2**31 - 1, (300_000,), generator=generator).int()}  # nothing to save
        manifest = source.publish(expected.items(), version)
        assert_equal(follower.receive(manifest), expected)
        chains.append([link["version"] for link in manifest["former"]])
        source.retire(version - 1)
    assert chains == [[], [0], [], [2], [], [4]]
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["v4", "v5"]


def test_what_others_build_on_stays_and_goes_with_them(source: DeltaSource, tmp_path: Path, temporary: Path) -> None:
    folder = tmp_path / "weights"
    manifests = [source.publish(weights(version).items(), version) for version in range(3)]
    source.retire(0)
    source.retire(1)
    source.retire(77)
    assert_equal(DeltaSink(tmp_path).receive(manifests[2]), weights(2))
    again = source.publish(weights(3).items(), 0)  # a label that others build on: whole
    source.retire(2)
    assert again["former"] == []
    assert [path.name for path in folder.iterdir()] == ["v0"]
    source.close()
    assert not folder.exists()
    assert not list(temporary.iterdir())


def test_a_publish_that_fails_leaves_what_the_next_builds_on(
    source: DeltaSource, tmp_path: Path, temporary: Path
) -> None:
    follower = DeltaSink(tmp_path)
    follower.receive(source.publish(weights(0).items(), 0))

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "large", torch.ones(1000)
        raise RuntimeError("rank lost")

    with pytest.raises(RuntimeError, match="rank lost"):
        source.publish(broken(), 1)
    with pytest.raises(ShapeError, match="complex"):
        source.publish([("a", torch.ones(1, dtype=torch.complex64))], 1)
    assert len(list(temporary.iterdir())) == 2, "one copy of the source, one of the sink"
    manifest = source.publish(weights(1).items(), 1)
    assert [link["version"] for link in manifest["former"]] == [0]
    assert_equal(follower.receive(manifest), weights(1))


@pytest.mark.parametrize(
    "former", [None, "x", [5], [{"version": 0}], [{"version": 0, "files": []}], [{"version": "0", "files": [{}]}]]
)
def test_T111_a_manifest_cannot_build_on_anything_else(source: DeltaSource, tmp_path: Path, former: Any) -> None:
    source.publish(weights(0).items(), 0)
    manifest = source.publish(weights(1).items(), 1)
    with pytest.raises(WeightsRefused, match="manifest"):
        DeltaSink(tmp_path).receive(manifest | {"former": former})


def test_T111_files_of_former_versions_are_named_as_strictly(source: DeltaSource, tmp_path: Path) -> None:
    source.publish(weights(0).items(), 0)
    manifest = source.publish(weights(1).items(), 1)
    manifest["former"][0]["files"][0]["name"] = "../v1/model-00001.safetensors"
    with pytest.raises(WeightsRefused, match="no file of this run"):
        DeltaSink(tmp_path).receive(manifest)
    manifest["former"][0] |= {"transfer": "disk", "files": manifest["files"]}
    with pytest.raises(WeightsRefused):
        DeltaSink(tmp_path).receive(manifest)


KILLED = """
import sys, tempfile, torch
from pathlib import Path
from areal.weights.delta import DeltaSource
tempfile.tempdir = sys.argv[2]
source = DeltaSource(Path(sys.argv[1]))
source.publish([("w", torch.zeros(1000))], 0)
def stuck():
    yield "w", torch.ones(1000)
    print("there", flush=True)
    sys.stdin.read()
source.publish(stuck(), 1)
"""


def test_what_a_killed_source_left_is_removed_by_the_next(tmp_path: Path, temporary: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(temporary)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"there\n"
        assert {path.name for path in (tmp_path / "weights").iterdir()} == {"v0", "v1.part"}
        assert len(list(temporary.iterdir())) == 2
        child.send_signal(signal.SIGKILL)
    source = DeltaSource(tmp_path)
    follower = DeltaSink(tmp_path)
    assert_equal(follower.receive(source.publish(weights(0).items(), 2)), weights(0))
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["v2"]
    assert {path.name.split("-")[2] for path in temporary.iterdir()} == {str(os.getpid())}
    source.close()


def test_a_full_temporary_folder_is_named_with_what_to_do(
    source: DeltaSource, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, follower = os.pwrite, DeltaSink(tmp_path)

    def full(file: int, data: Any, at: int) -> int:
        if os.readlink(f"/proc/self/fd/{file}").startswith(str(temporary)):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data, at)

    first = source.publish(weights(0).items(), 0)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match=r"version 1: cannot keep a copy .*set TMPDIR"):
            source.publish(weights(1).items(), 1)
        with pytest.raises(OSError, match="set TMPDIR"):
            follower.receive(first)
    assert len(list(temporary.iterdir())) == 1
    assert source.publish(weights(1).items(), 1)["former"]
    assert_equal(follower.receive(first), weights(0))
