"""Packing: the forest says the same as rows by themselves, and computes less."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from areal.base.errors import ShapeError, TrainingError
from areal.engine.batch import PackedBatch, loss_weights, pack
from areal.engine.commands import Row
from areal.engine.engine import TrainEngine
from areal.engine.rows import RowArrays, decode_row

MakeRow = Callable[..., Row]
GroupRows = Callable[..., list[Row]]
MakeEngine = Callable[..., TrainEngine]


def plain_logprobs(engine: TrainEngine, rows: Sequence[RowArrays]) -> list[Tensor]:
    """The definition: each row alone through the model's own forward, full log_softmax."""
    model, result = engine.policy.model, []
    model.set_attn_implementation("sdpa")
    for row in rows:
        logits = model(input_ids=torch.from_numpy(row.ids).long()[None], use_cache=False).logits[0, :-1]
        logp = (logits / torch.from_numpy(row.temperatures)[1:, None]).log_softmax(-1)
        result.append(logp.gather(1, torch.from_numpy(row.ids[1:]).long()[:, None])[:, 0])
    model.set_attn_implementation("areal_forest")
    return result


def weighted_gradients(engine: TrainEngine, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    grads = {name: p.grad.clone() for name, p in engine.policy.trained_parameters() if p.grad is not None}
    for _, p in engine.policy.trained_parameters():
        p.grad = None
    return grads


def packed_loss(engine: TrainEngine, packs: Sequence[PackedBatch]) -> Tensor:
    return torch.stack([(engine.policy(p)[0] * p.advantages * p.weight).sum() for p in packs]).sum()


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("max_tokens", [20, 64, 10_000])
def test_packed_rows_equal_rows_by_themselves(
    make_engine: MakeEngine, group_rows: GroupRows, max_tokens: int, share: bool
) -> None:
    engine = make_engine()
    rows = loss_weights([decode_row(row) for row in group_rows(groups=3)], "token_mean")
    packs = list(pack(rows, max_tokens=max_tokens, share_prefixes=share))
    plain = plain_logprobs(engine, rows)
    for p in packs:
        ours = engine.policy(p)[0]
        theirs = torch.stack([plain[r][t - 1] for r, t in zip(p.row, p.position, strict=True)])
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    advantages = [torch.from_numpy(row.advantages * row.weight)[1:] for row in rows]
    expected = weighted_gradients(engine, torch.cat([a * p for a, p in zip(advantages, plain, strict=True)]).sum())
    got = weighted_gradients(engine, packed_loss(engine, packs))
    assert got.keys() == expected.keys()
    for name in got:
        torch.testing.assert_close(got[name], expected[name], atol=1e-5, rtol=1e-5)


def test_every_trained_token_is_predicted_once(group_rows: GroupRows) -> None:
    rows = [decode_row(row) for row in group_rows(groups=4)]
    seen = sorted((int(r), int(t)) for p in pack(rows, max_tokens=50) for r, t in zip(p.row, p.position, strict=True))
    assert seen == [(r, int(t)) for r, row in enumerate(rows) for t in np.flatnonzero(row.trained)]


def test_a_branch_point_predicts_each_of_its_next_tokens(make_row: MakeRow) -> None:
    rows = [make_row([5, 6, 7, last], [3]) for last in (10, 11, 12)]
    [p] = pack([decode_row(row) for row in rows], max_tokens=100)
    assert p.ids.tolist() == [5, 6, 7]
    assert p.source.tolist() == [2, 2, 2]
    assert p.target.tolist() == [10, 11, 12]


def test_a_row_that_is_the_beginning_of_another_adds_no_token(make_row: MakeRow) -> None:
    short, long = make_row([5, 6, 7, 8], [2, 3]), make_row([5, 6, 7, 8, 9, 10], [4, 5])
    [p] = pack([decode_row(row) for row in (long, short, short)], max_tokens=100)
    assert p.ids.tolist() == [5, 6, 7, 8, 9]
    assert sorted(zip(p.row.tolist(), p.source.tolist(), p.target.tolist(), strict=True)) == [
        (0, 3, 9), (0, 4, 10), (1, 1, 7), (1, 2, 8), (2, 1, 7), (2, 2, 8),
    ]  # fmt: skip


def test_shared_prompts_are_computed_once(make_row: MakeRow) -> None:
    rng = np.random.default_rng(0)
    stem = rng.integers(0, 60, 35).tolist()
    rows = [
        decode_row(make_row([*stem, 100 + k, *rng.integers(0, 60, 11).tolist()], list(range(35, 47)))) for k in range(8)
    ]
    [shared] = pack(rows, max_tokens=4096)
    [separate] = pack(rows, max_tokens=4096, share_prefixes=False)
    assert len(shared.ids) == 35 + 8 * 11
    assert len(separate.ids) == shared.row_tokens == 8 * 46
    assert shared.shared_by.sum() == shared.row_tokens
    assert shared.shared_by.max() == 8
    assert (separate.shared_by == 1).all()


def test_rows_without_a_common_prefix_are_block_diagonal(make_row: MakeRow) -> None:
    rows = [decode_row(make_row([k, 2, 3, 4], [3])) for k in range(5)]
    [p] = pack(rows, max_tokens=100)
    [block] = p.blocks
    expected = torch.block_diag(*[torch.ones(3, 3).tril()] * 5).bool()
    assert torch.equal(block.mask, expected)
    assert p.positions.tolist() == [0, 1, 2] * 5


def test_long_rows_are_split_into_query_blocks(
    make_engine: MakeEngine, make_row: MakeRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal.engine.batch.BLOCK", 7)
    engine = make_engine()
    rng = np.random.default_rng(4)
    stem = rng.integers(0, 60, 17).tolist()
    rows = [decode_row(make_row([*stem, *rng.integers(0, 60, 13).tolist()], list(range(17, 30)))) for _ in range(3)]
    [p] = pack(rows, max_tokens=1000)
    assert len(p.blocks) > 6
    assert max(b.end - b.start for b in p.blocks) <= 7
    plain = plain_logprobs(engine, rows)
    theirs = torch.stack([plain[r][t - 1] for r, t in zip(p.row, p.position, strict=True)])
    torch.testing.assert_close(engine.policy(p)[0], theirs, atol=1e-5, rtol=1e-5)


def test_micro_batches_keep_to_the_budget(group_rows: GroupRows) -> None:
    rows = [decode_row(row) for row in group_rows(groups=6)]
    sizes = [len(p.ids) for p in pack(rows, max_tokens=40)]
    assert len(sizes) > 1
    assert max(sizes) <= 40
    assert [len(p.ids) for p in pack(rows[:1], max_tokens=2)] == [len(rows[0].ids) - 1]


def test_T073_weights_cover_the_whole_step(make_row: MakeRow) -> None:
    rows = [decode_row(make_row([1] * 5, [1, 2, 3, 4], sequence=0)), decode_row(make_row([1] * 2, [1], sequence=1))]
    losses = [np.array([0, 1, 1, 1, 1]), np.array([0, 5])]
    for aggregation, expected in (("token_mean", 1.8), ("sequence_mean", 3.0)):
        weighted = loss_weights(rows, aggregation)
        total = sum(float((loss * row.weight).sum()) for loss, row in zip(losses, weighted, strict=True))
        assert total == pytest.approx(expected)


def test_T078_masks_are_by_position_never_by_token(make_row: MakeRow) -> None:
    """pad equals end: [5,6,7] without an end token and [5,2] with one, lengths 3 and 2."""
    rows = [decode_row(make_row([9, 5, 6, 7], [1, 2, 3])), decode_row(make_row([9, 5, 2], [1, 2]))]
    [p] = pack(rows, max_tokens=100)
    assert sorted(zip(p.row.tolist(), p.target.tolist(), strict=True)) == [(0, 5), (0, 6), (0, 7), (1, 2), (1, 5)]


def test_nothing_to_train_is_an_error(make_row: MakeRow) -> None:
    with pytest.raises(TrainingError, match="no trained token"):
        loss_weights([decode_row(make_row([1, 2], []))], "token_mean")


def test_rows_that_do_not_fit_name_their_session(make_row: MakeRow) -> None:
    with pytest.raises(ShapeError, match="session s-9: a trained token needs a token before it"):
        decode_row(make_row([1, 2], [0], session="s-9"))
    row = make_row([1, 2, 3], [2], session="s-9")
    cut = Row(row.session_id, 0, row.ids, row.trained, row.logprobs[:8], row.versions, row.temperatures)
    with pytest.raises(ShapeError, match="session s-9: 2 logprobs for 3 token ids"):
        decode_row(cut)


@pytest.mark.parametrize("field", ["logprobs", "advantage", "temperature"])
def test_nan_in_a_trained_token_names_the_session(make_row: MakeRow, field: str) -> None:
    with pytest.raises(TrainingError, match=r"session s-7: .* of trained token 2 is nan"):
        decode_row(make_row([1, 2, 3, 4], [2, 3], session="s-7", **{field: float("nan")}))


def test_T076_nan_in_untrained_slots_changes_nothing(make_engine: MakeEngine, make_row: MakeRow) -> None:
    engine = make_engine()
    clean = make_row([1, 2, 3, 4, 5], [2, 4])
    poisoned = {}
    for name in ("logprobs", "advantages", "temperatures"):
        values = np.frombuffer(getattr(clean, name), dtype="<f4").copy()
        values[[0, 1, 3]] = np.nan
        poisoned[name] = values.tobytes()
    dirty = Row(clean.session_id, 0, clean.ids, clean.trained, versions=clean.versions, **poisoned)
    grads = []
    for row in (clean, dirty):
        [p] = pack(loss_weights([decode_row(row)], "token_mean"), max_tokens=100)
        grads.append(weighted_gradients(engine, packed_loss(engine, [p])))
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])
