"""How rows are spread over the data ranks: by cost, each once, as many micro-batches on every rank."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from areal.engine.batch import pack
from areal.engine.commands import Row
from areal.engine.parallel.data import balanced, cost, share
from areal.engine.rows import decode_row


def best(costs: list[float], ranks: int) -> float:
    """The least that the busiest rank can have, by trying everything."""
    ways = itertools.product(range(ranks), repeat=len(costs))
    return min(
        max(sum(c for c, at in zip(costs, way, strict=True) if at == rank) for rank in range(ranks)) for way in ways
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_busiest_rank_is_within_a_third_of_the_best(ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    for _ in range(20):
        costs = rng.exponential(size=6).tolist()
        shares = balanced(costs, ranks)
        assert sorted(itertools.chain(*shares)) == list(range(6))
        assert all(share == sorted(share) for share in shares)
        assert max(sum(costs[number] for number in share) for share in shares) <= 4 / 3 * best(costs, ranks) + 1e-9


def test_one_dear_item_counts_as_much_as_many_cheap_ones() -> None:
    assert balanced([1.0, 1.0, 4.0, 1.0, 1.0], 2) == [[2], [0, 1, 3, 4]]


def test_attention_is_part_of_the_cost(make_row: Callable[..., Row]) -> None:
    long = [make_row(list(range(2, 60)) * 20, [1159])]
    short = [make_row([k, *range(2, 59)], [57], session=f"s{k}", sequence=k) for k in range(20)]
    [one], [many] = (list(pack([decode_row(row) for row in rows], max_tokens=10_000)) for rows in (long, short))
    assert abs(len(one.ids) - len(many.ids)) < 30
    assert cost(one) > 1.05 * cost(many)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("budget", [64, 10_000])
def test_every_trained_token_is_on_one_rank_and_all_ranks_take_part_as_often(
    group_rows: Callable[..., list[Row]], ranks: int, budget: int
) -> None:
    rows = [decode_row(row) for row in group_rows(groups=3)]
    shares = [share(rows, ranks=ranks, rank=rank, max_tokens=budget) for rank in range(ranks)]
    assert len({len(packs) for packs in shares}) == 1
    tokens = Counter(
        (int(row), int(position))
        for packs in shares
        for packed in packs
        for row, position in zip(packed.row, packed.position, strict=True)
    )
    assert tokens == Counter((number, int(at)) for number, row in enumerate(rows) for at in np.flatnonzero(row.trained))
    assert all(any(len(packed.target) for packed in packs) for packs in shares), "a rank without work"


def test_a_rank_for_which_there_is_no_row_goes_through_an_empty_micro_batch(make_row: Callable[..., Row]) -> None:
    rows = [decode_row(make_row([3, 4, 5], [2]))]
    [one], [empty] = (share(rows, ranks=2, rank=rank, max_tokens=64) for rank in range(2))
    assert len(one.target) == 1
    assert len(empty.target) == 0
    assert len(empty.ids) == 1
