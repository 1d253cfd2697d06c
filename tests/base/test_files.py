"""File names made from data, and files that are complete or absent."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.base.atomic import write_atomic
from areal.base.names import safe_name

HOSTILE = ["../../x", "a/b", "..", ".", "...", "x" * 5000, "nul\0byte", "🙂", "", "-rf", "~", "a\nb", "%2E", "\udc80"]


@pytest.mark.parametrize("name", HOSTILE)
def test_T111_a_name_is_one_path_component_that_can_be_written(name: str, tmp_path: Path) -> None:
    path = tmp_path / safe_name(name)
    path.write_text("here")
    assert list(tmp_path.iterdir()) == [path]
    assert path.parent == tmp_path


@given(st.text(), st.text())
def test_T111_different_names_give_different_files(one: str, other: str) -> None:
    assert (safe_name(one) == safe_name(other)) == (one == other)


@given(st.text())
def test_T111_names_are_bounded_and_plain(name: str) -> None:
    encoded = safe_name(name)
    assert 0 < len(encoded) <= 120
    assert encoded.isascii()
    assert encoded[0] not in ".-/"
    assert not set(encoded) & set("/\\\0 \n")


def test_T111_ordinary_names_stay_readable_and_long_ones_apart() -> None:
    assert safe_name("my-exp_2.1") == "my-exp_2.1"
    assert safe_name("a" * 4999 + "b") != safe_name("a" * 5000)


def test_write_atomic_replaces_whole_and_sets_the_mode(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    write_atomic(path, b"one")
    write_atomic(path, b"two")
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_write_atomic_leaves_the_old_file_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    (path / "inside").touch()
    with pytest.raises(OSError):
        write_atomic(path, b"data")
    assert list(tmp_path.iterdir()) == [path]


def test_readers_never_see_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    contents = {b"a" * 200_000, b"b" * 200_000}
    write_atomic(path, b"a" * 200_000)
    done = threading.Event()
    seen: set[bytes] = set()

    def read() -> None:
        while not done.is_set():
            seen.add(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(10):
        for data in contents:
            write_atomic(path, data)
    done.set()
    reader.join()
    assert seen <= contents
