"""The pipeline dimension: its orders can be carried out and are tight, its twins are one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from areal.base.errors import ShapeError
from areal.engine.commands import Row
from areal.engine.parallel.schedule import Backward, Forward, schedule, stage_layers
from tests.engine.parallel.pool import Case, Pool, alone
from tests.engine.parallel.twins import assert_twins

GroupRows = Callable[..., list[Row]]


def carried_out(ranks: int, chunks: int, micro_batches: int) -> tuple[int, list[int]]:
    """Rounds until all is done when a forward or backward takes one round and what a step needs must have been done in an earlier one, and
    the most micro-batches that each rank kept at once. Fails where nobody can go on, or where a neighbour's order differs from ours."""
    orders, stages = schedule(ranks, chunks, micro_batches), ranks * chunks
    todo = [list(order) for order in orders]
    done: set[tuple[type, int, int]] = set()
    kept, most, rounds = [0] * ranks, [0] * ranks, 0
    while any(todo):
        now = []
        for rank in range(ranks):
            if not todo[rank]:
                continue
            step = todo[rank][0]
            stage = step.chunk * ranks + rank
            if isinstance(step, Forward):
                needs = [] if stage == 0 else [(Forward, stage - 1, step.micro_batch)]
            else:
                needs = [(Forward, stage, step.micro_batch)]
                needs += [] if stage == stages - 1 else [(Backward, stage + 1, step.micro_batch)]
            if all(need in done for need in needs):
                now.append((rank, (type(step), stage, step.micro_batch)))
        assert now, f"nobody can go on: {[each[:1] for each in todo]}"
        for rank, what in now:
            todo[rank].pop(0)
            done.add(what)
            kept[rank] += 1 if what[0] is Forward else -1
            most[rank] = max(most[rank], kept[rank])
        rounds += 1
    assert len(done) == 2 * stages * micro_batches
    return rounds, most


def whole_rounds(ranks: int, chunks: int) -> list[int]:
    return [number for number in range(1, 14) if chunks == 1 or number % ranks == 0]


def test_a_broken_round_is_refused() -> None:
    with pytest.raises(ShapeError, match="5 micro-batches do not make whole rounds of 4"):
        schedule(4, 3, 5)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_every_order_can_be_carried_out(ranks: int, chunks: int) -> None:
    for micro_batches in whole_rounds(ranks, chunks):
        carried_out(ranks, chunks, micro_batches)


def test_one_forward_one_backward_has_the_bubble_and_the_memory_of_the_paper() -> None:
    for ranks, micro_batches in ((2, 4), (4, 8), (4, 16)):
        rounds, most = carried_out(ranks, 1, micro_batches)
        assert rounds == 2 * (micro_batches + ranks - 1)
        assert most == [min(micro_batches, ranks - rank) for rank in range(ranks)]


def test_interleaving_shrinks_the_bubble() -> None:
    for ranks, chunks, micro_batches in ((2, 2, 4), (4, 2, 8), (4, 3, 8)):
        rounds, _ = carried_out(ranks, chunks, micro_batches)
        plain, _ = carried_out(ranks, 1, micro_batches)
        assert rounds - 2 * chunks * micro_batches < chunks * (plain - 2 * micro_batches)


def test_what_is_sent_is_what_is_received_next() -> None:
    """Point-to-point messages have no names: a rank must want them in the order in which its neighbour makes them."""
    for ranks in (2, 3, 4):
        for chunks in (1, 2, 3):
            for micro_batches in whole_rounds(ranks, chunks):
                orders = schedule(ranks, chunks, micro_batches)
                stages = ranks * chunks
                for rank in range(ranks):
                    after = (rank + 1) % ranks
                    for kind, giver, taker, shift in ((Forward, rank, after, 1), (Backward, after, rank, -1)):
                        made = [
                            (s.chunk * ranks + giver + shift, s.micro_batch) for s in orders[giver] if type(s) is kind
                        ]
                        wanted = [(s.chunk * ranks + taker, s.micro_batch) for s in orders[taker] if type(s) is kind]
                        first, last = (0, stages) if kind is Forward else (stages - 1, -1)
                        assert [each for each in made if each[0] not in (stages, -1)] == [
                            each for each in wanted if each[0] not in (first, last)
                        ]


def test_layers_are_spread_and_the_ends_have_fewer() -> None:
    assert stage_layers(30, 4) == [range(7), range(7, 15), range(15, 23), range(23, 30)]
    assert stage_layers(4, 4) == [range(k, k + 1) for k in range(4)]
    for layers in range(1, 20):
        for stages in range(1, layers + 1):
            sizes = [len(each) for each in stage_layers(layers, stages)]
            assert sum(sizes) == layers
            assert max(sizes) - min(sizes) <= 1


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a random net whose head is tied or not."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    def write(*, tied: bool) -> Path:
        torch.manual_seed(7)
        config = Qwen3Config(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            tie_word_embeddings=tied,
        )
        folder = tmp_path_factory.mktemp("four")
        Qwen3ForCausalLM(config).save_pretrained(folder)
        return folder

    return write


def assert_pipeline(pool: Pool, backend: str, folder: Path, rows: list[Row], **settings: object) -> None:
    case = Case(backend, str(folder), rows, settings={"max_tokens_per_mb": 64} | settings)
    ours, theirs = pool.run(case), alone(case)
    assert_twins(ours, theirs)
    for mine, expected in zip(ours.scores, theirs.scores, strict=True):
        assert mine == pytest.approx(expected, abs=1e-5)
    for name in ("grad_norm", "entropy", "trained_tokens", "logprob_gap_mean"):
        assert ours.stats[0][name] == pytest.approx(theirs.stats[0][name], rel=1e-5), name


@pytest.mark.parametrize("tied", [True, False])
def test_two_stages_train_as_one_process(
    pool: Pool, four_layers: Callable[..., Path], group_rows: GroupRows, tied: bool
) -> None:
    assert_pipeline(pool, "archon:p2", four_layers(tied=tied), group_rows(groups=3))


@pytest.mark.heavy
@pytest.mark.parametrize("groups", [1, 3])
def test_interleaved_stages_train_as_one_process(
    pool: Pool, four_layers: Callable[..., Path], group_rows: GroupRows, groups: int
) -> None:
    """With one group the round is filled up with empty micro-batches."""
    assert_pipeline(pool, "archon:p2", four_layers(tied=True), group_rows(groups=groups), pipeline_chunks=2)


@pytest.mark.heavy
def test_a_sequence_level_loss_and_several_mini_batches_go_through_a_pipeline(
    pool: Pool, four_layers: Callable[..., Path], group_rows: GroupRows
) -> None:
    settings = {"algorithm": "gspo", "mini_batch_size": 4}
    assert_pipeline(pool, "archon:p2", four_layers(tied=True), group_rows(groups=3), **settings)


@pytest.mark.heavy
@pytest.mark.parametrize("backend", ["archon:d2p2", "archon:p4", "archon:t2p2", "archon:p2c2"])
def test_four_processes_with_a_pipeline_train_as_one(
    pool: Pool, four_layers: Callable[..., Path], group_rows: GroupRows, backend: str
) -> None:
    assert_pipeline(pool, backend, four_layers(tied=True), group_rows(groups=3))


@pytest.mark.heavy
def test_a_missing_sum_over_the_tied_ends_is_seen(
    pool: Pool, four_layers: Callable[..., Path], group_rows: GroupRows
) -> None:
    rows, folder = group_rows(groups=2), str(four_layers(tied=True))
    whole = Case("archon:p2", folder, rows)
    with pytest.raises(AssertionError):
        assert_twins(pool.run(Case("archon:p2", folder, rows, fault="tied_ends_apart")), alone(whole))
