"""What two pieces of one tensor have in common, against a naive twin; files that do not make a tensor up are refused. No processes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from areal.base.errors import CheckpointError
from areal.engine.parallel.gather import Piece
from areal.engine.parallel.pieces import Runs, overlaps, sizes_of
from areal.engine.parallel.world import World
from areal.engine.piece_files import HeldPiece, SavedPieces, own_pieces, write_pieces


def _some_runs(size: int, chance: random.Random) -> Runs:
    """Of an axis: any of its indices, in order."""
    held = sorted(chance.sample(range(size), chance.randint(0, size)))
    runs: list[tuple[int, int]] = []
    for index in held:
        if runs and index == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return tuple(runs) or ((0, 0),)


def _cut(whole: Tensor, runs: tuple[Runs, ...]) -> Tensor:
    """The piece, index by index."""
    for axis, each in enumerate(runs):
        indices = [index for start, length in each for index in range(start, start + length)]
        whole = whole.index_select(axis, torch.tensor(indices, dtype=torch.long))
    return whole


def test_what_two_pieces_have_in_common_is_what_a_naive_twin_finds() -> None:
    chance = random.Random(5)
    met = 0
    for _ in range(300):
        shape = [chance.randint(1, 6) for _ in range(chance.randint(1, 3))]
        whole = torch.arange(1, 1 + torch.Size(shape).numel()).view(shape)
        one, other = (tuple(_some_runs(size, chance) for size in shape) for _ in range(2))
        source, target = _cut(whole, one), torch.zeros(sizes_of(other), dtype=whole.dtype)
        for there, here in overlaps(one, other):
            assert not target[here].any()  # each number once
            target[here] = source[there]
        both = set(source.flatten().tolist()) & set(_cut(whole, other).flatten().tolist())
        wanted = _cut(whole, other)
        assert torch.equal(target, torch.where(torch.isin(wanted, torch.tensor(sorted(both))), wanted, 0))
        met += bool(both)
    assert met > 50


def _write(path: Path, whole: Tensor, runs: tuple[Runs, ...], name: str = "m") -> Path:
    piece = Piece(name, "float32", tuple(whole.shape), runs)
    write_pieces(path, {name: HeldPiece(piece, _cut(whole, runs).contiguous())})
    return path


def test_pieces_that_do_not_make_a_tensor_up_are_refused(tmp_path: Path) -> None:
    whole = torch.randn(6, 4)
    top, bottom = (((0, 3),), ((0, 4),)), (((3, 3),), ((0, 4),))
    first, second = _write(tmp_path / "a", whole, top), _write(tmp_path / "b", whole, bottom)
    with SavedPieces([first, second]) as saved:
        assert torch.equal(saved.whole("m"), whole)
    lacks = "do not make up m; resume from an earlier checkpoint"
    with pytest.raises(CheckpointError, match=lacks), SavedPieces([first]):
        pass
    with pytest.raises(CheckpointError, match=lacks), SavedPieces([first, _write(tmp_path / "c", whole, top)]):
        pass
    other = _write(tmp_path / "d", torch.randn(7, 4), (((3, 4),), ((0, 4),)))
    with pytest.raises(CheckpointError, match="does not belong to the files beside it"), SavedPieces([first, other]):
        pass
    (tmp_path / "e").write_bytes(b"no safetensors")
    with pytest.raises(CheckpointError, match=r"is damaged .*; resume from an earlier"), SavedPieces([tmp_path / "e"]):
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_whole_tensors_need_no_entry(tmp_path: Path, dtype: torch.dtype) -> None:
    numbers = torch.arange(12).view(3, 4).to(dtype)
    pieces = own_pieces([("m", numbers), ("s", numbers[0, 1])], World.alone())
    write_pieces(tmp_path / "a", pieces)
    with SavedPieces([tmp_path / "a"]) as saved:
        assert saved.dtype("m") == dtype
        assert torch.equal(saved.whole("m"), numbers)
        assert saved.whole("s") == numbers[0, 1]
        assert torch.equal(saved.read("m", like=numbers), numbers)
