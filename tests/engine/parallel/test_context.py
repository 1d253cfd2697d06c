"""The context dimension: its twins are one process, both kinds of attention, and no prediction is lost or counted twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from areal.config.engine import ContextKind
from areal.engine.batch import PackedBatch, loss_weights, pack
from areal.engine.commands import Row
from areal.engine.parallel.context import Tokens
from areal.engine.parallel.data import share
from areal.engine.parallel.world import World
from areal.engine.rows import RowArrays, decode_row
from tests.engine.parallel.conftest import WriteNet
from tests.engine.parallel.pool import Case, Pool, alone
from tests.engine.parallel.twins import WEIGHTS, assert_twins

GroupRows = Callable[..., list[Row]]


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["allgather", "ulysses"])
@pytest.mark.parametrize("backend", ["archon:c2", "archon:c4", "archon:d2c2", "archon:t2c2", "archon:p2c2"])
def test_context_ranks_train_as_one_process(
    pool: Pool, write_net: WriteNet, group_rows: GroupRows, backend: str, kind: str
) -> None:
    """Two key heads: fewer than c4, and one for each t rank, so that ulysses repeats them."""
    assert_one_process(pool, backend, write_net(tie_word_embeddings=True), group_rows(groups=3), context_parallel=kind)


@pytest.mark.heavy
def test_eight_processes_with_d_t_and_c_train_as_one(pool: Pool, write_net: WriteNet, group_rows: GroupRows) -> None:
    assert_one_process(pool, "archon:d2t2c2", write_net(), group_rows(groups=3))


@pytest.mark.heavy
def test_a_loss_over_whole_answers_goes_over_pieces(pool: Pool, tiny_dir: Path, group_rows: GroupRows) -> None:
    settings = {"algorithm": "gspo", "mini_batch_size": 4}
    assert_one_process(pool, "archon:c2", tiny_dir, group_rows(groups=3, output=12), **settings)


@pytest.mark.heavy
@pytest.mark.parametrize("backend", ["archon:c2", "archon:t2c2"])
def test_a_critic_says_the_same_in_pieces(pool: Pool, tiny_dir: Path, group_rows: GroupRows, backend: str) -> None:
    assert_one_process(pool, backend, tiny_dir, group_rows(groups=3), role="critic")


def assert_one_process(pool: Pool, backend: str, folder: Path, rows: list[Row], **settings: object) -> None:
    case = Case(backend, str(folder), rows, settings={"max_tokens_per_mb": 64} | settings)
    ours, theirs = pool.run(case), alone(case)
    # A critic's head begins at 0, so that three steps of AdamW, which weighs the smallest gradients like the largest, are all there is of it.
    assert_twins(ours, theirs, weights=5e-5 if settings.get("role") == "critic" else WEIGHTS)
    for mine, expected in zip(ours.scores, theirs.scores, strict=True):
        assert mine == pytest.approx(expected, abs=2e-6)
    for name in ("entropy", "trained_tokens", "logprob_gap_mean"):
        assert ours.stats[0][name] == pytest.approx(theirs.stats[0][name], rel=1e-5), name
    if not backend.startswith("archon:d"):  # d packs rows anew
        assert ours.stats[0]["computed_tokens"] == theirs.stats[0]["computed_tokens"]  # filling does not count


@pytest.mark.heavy
def test_a_missing_sum_over_context_ranks_is_seen(pool: Pool, tiny_dir: Path, group_rows: GroupRows) -> None:
    settings = {"context_parallel": "allgather"}
    case = Case("archon:c2", str(tiny_dir), group_rows(), settings=settings, fault="keys_of_others_alone")
    ours, theirs = pool.run(case), alone(case)
    assert ours.losses[0] == pytest.approx(theirs.losses[0], abs=5e-6)
    with pytest.raises(AssertionError):
        assert_twins(ours, theirs)


def row_of(ids: int) -> RowArrays:
    """`ids` tokens, all but the first trained, of losses that the tests make up."""
    row = Row(
        session_id="s",
        sequence=ids,
        ids=np.arange(ids, dtype="<i4").tobytes(),
        trained=np.array([False] + [True] * (ids - 1)).tobytes(),
        logprobs=np.zeros(ids, "<f4").tobytes(),
        versions=np.zeros(ids, "<i4").tobytes(),
        temperatures=np.ones(ids, "<f4").tobytes(),
        advantages=np.ones(ids, "<f4").tobytes(),
    )
    return decode_row(row)


@pytest.mark.heavy
@pytest.mark.parametrize("ids", [9, 8])
@pytest.mark.parametrize("kind", ["allgather", "ulysses"])
def test_T087_no_prediction_is_lost_between_two_ranks(pool: Pool, ids: int, kind: ContextKind) -> None:
    """9 ids make 8 predictions from 8 tokens, 8 ids 7 from 7, which are filled up to 8."""
    expected = -sum(range(1, ids)) / 10
    assert ids != 9 or expected == pytest.approx(-3.6)
    for backend in ("archon:c1", "archon:c2", "archon:c4"):
        ranks = int(backend[-1])
        answers = pool.call(backend, sum_of_predictions, ids, kind)
        assert [total for total, _, _ in answers] == pytest.approx([expected] * ranks)
        assert sorted(source for _, sources, _ in answers for source in sources) == list(range(ids - 1))
        gradients = torch.tensor([gradient for _, _, gradient in answers])
        assert gradients.sum(0).tolist() == [1.0] * (ids - 1)  # each prediction goes backward on one rank


def sum_of_predictions(world: World, ids: int, kind: ContextKind) -> tuple[float, list[int], list[float]]:
    """Of log-probs -0.1, -0.2, ..., of which each rank knows those of its own tokens; which tokens these are; the gradient of the sum."""
    [packed] = pack([row_of(ids)], max_tokens=64)
    tokens = Tokens(world, kind)
    piece = tokens.piece(packed)
    known = (-torch.arange(1, ids) / 10).requires_grad_()
    assert piece.ids[piece.source].tolist() == piece.of(packed.source).tolist()  # ids count up as tokens do
    total = tokens.joined(piece.of(known), piece).sum()
    total.backward()  # type: ignore[no-untyped-call]
    assert known.grad is not None
    return float(total), piece.of(packed.source).tolist(), known.grad.tolist()


@pytest.mark.heavy
@pytest.mark.parametrize("backend", ["archon:d1", "archon:d2", "archon:c2", "archon:d2c2", "archon:d2t2"])
def test_T084_every_token_weighs_the_same_wherever_it_lies(pool: Pool, backend: str) -> None:
    """Losses 1, 1, 1 on one rank and 5 on the other: (1 + 1 + 1 + 5) / 4, not the mean of 1 and 5."""
    for loss, gradient in pool.call(backend, uneven_loss):
        assert loss == pytest.approx(2.0)
        assert gradient == pytest.approx(2.0)


def uneven_loss(world: World) -> tuple[float, float]:
    """The loss over all ranks, and its gradient to a number that all losses are multiplied by."""
    rows = loss_weights([row_of(4), replace(row_of(2), ids=np.array([7, 8], np.int32))], "token_mean")
    scale = torch.ones((), requires_grad=True)
    tokens, total = Tokens(world), torch.zeros(())
    for packed in share(rows, ranks=world.size("d"), rank=world.index("d"), max_tokens=64):
        piece = tokens.piece(packed)
        losses = torch.where(torch.from_numpy(packed.row) == 0, 1.0, 5.0)
        loss = (packed.weight * tokens.joined(scale * piece.of(losses), piece)).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    assert scale.grad is not None
    summed = world.sum(torch.stack([total if world.counts else torch.zeros(()), scale.grad / world.size("t")]))
    return float(summed[0]), float(summed[1])


@pytest.mark.heavy
@pytest.mark.parametrize(("sequence_parallel", "unit"), [(True, 4), (False, 2)])
def test_pieces_are_of_one_length_and_what_fills_them_counts_for_nothing(
    pool: Pool, sequence_parallel: bool, unit: int
) -> None:
    [packed] = pack([row_of(10)], max_tokens=64)
    n = len(packed.ids)
    filling = [0] * (-n % unit)
    assert filling
    pieces = pool.call("archon:t2c2", piece_of, packed, sequence_parallel)
    for t in (0, 1):  # ranks lie in the order c, t
        ids, shared_by, between = zip(*pieces[t::2], strict=True)
        assert [len(piece) for piece in ids] == [(n + len(filling)) // 2] * 2
        assert list(chain(*ids)) == packed.ids.tolist() + filling
        assert list(chain(*shared_by)) == [1.0] * n + filling
        assert list(between) == [(n + len(filling)) // unit] * 2


def piece_of(world: World, packed: PackedBatch, sequence_parallel: bool) -> tuple[list[int], list[float], int]:
    tokens = Tokens(world, sequence_parallel=sequence_parallel)
    piece = tokens.piece(packed)
    return piece.ids.tolist(), piece.shared_by.tolist(), tokens.between(packed)
