"""Training steps against a hand-written loop, and what must not change them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from areal.algorithms import ALGORITHMS
from areal.base.errors import ConfigError, TrainingError
from areal.engine.batch import pack
from areal.engine.commands import Row
from areal.engine.engine import TrainEngine
from areal.engine.optimizer import Optimizer
from areal.engine.rows import RowArrays, decode_row

MakeEngine = Callable[..., TrainEngine]
MakeRow = Callable[..., Row]
GroupRows = Callable[..., list[Row]]


def weights(engine: TrainEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.named_tensors()}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], atol: float = 0.0) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=atol, rtol=0, msg=name)


def with_fields(row: Row, **changes: bytes) -> Row:
    return Row(**({name: getattr(row, name) for name in Row.__struct_fields__} | changes))


def recorded_now(engine: TrainEngine, rows: list[Row], version: int) -> list[Row]:
    """The rows as if sampled by the engine's present weights."""
    scored = engine.score(rows)
    result = []
    for row, logprobs in zip(rows, scored, strict=True):
        trained = np.frombuffer(row.trained, dtype="?")
        versions = np.where(trained, version, -1).astype("<i4")
        result.append(with_fields(row, logprobs=logprobs.astype("<f4").tobytes(), versions=versions.tobytes()))
    return result


def reference_step(model_dir: str, rows: list[RowArrays], lr: float) -> tuple[float, float, dict[str, Tensor]]:
    """GRPO with the decoupled PPO objective, one padded batch, written out: loss, gradient norm, new weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    width = max(len(row.ids) for row in rows)

    def padded(name: str, fill: float) -> Tensor:
        return torch.tensor(
            np.array([np.pad(getattr(row, name), (0, width - len(row.ids)), constant_values=fill) for row in rows])
        )

    ids, mask = padded("ids", 0).long(), padded("trained", 0)[:, 1:]
    attention = torch.arange(width)[None] < torch.tensor([[len(row.ids)] for row in rows])
    logits = (
        model(input_ids=ids, attention_mask=attention.long()).logits[:, :-1] / padded("temperatures", 1)[:, 1:, None]
    )
    new = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    prox, old, advantage = new.detach(), padded("logprobs", 0)[:, 1:], padded("advantages", 0)[:, 1:]
    ratio = (new - prox).exp()
    objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) * (prox - old).exp().clamp(max=5)
    loss = -(objective * mask).sum() / mask.sum()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
    optimizer.step()
    return loss.item(), norm, {name: p.detach() for name, p in model.named_parameters()}


def test_a_grpo_step_equals_a_plain_padded_loop(make_engine: MakeEngine, group_rows: GroupRows) -> None:
    engine = make_engine(optimizer={"lr": 1e-3, "gradient_clipping": 0.5})
    rows = group_rows(groups=3)
    loss, norm, expected = reference_step(engine.settings.model_dir, [decode_row(row) for row in rows], 1e-3)
    stats = engine.train_step(rows, 0, 0)
    assert stats["loss"] == pytest.approx(loss, rel=1e-4)
    assert stats["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert norm > 0.5  # clipping was at work
    ours = weights(engine)
    # AdamW's first step is lr * sign(g) where g is not tiny: compare where rounding cannot flip it.
    for name, tensor in expected.items():
        assert (ours[name] - tensor).abs().quantile(0.99).item() < 1e-6, name


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed_length"])
def test_T073_T074_the_split_into_micro_batches_changes_nothing(
    make_engine: MakeEngine, group_rows: GroupRows, aggregation: str
) -> None:
    results = []
    for budget in (10_000, 100, 64):
        engine = make_engine(max_tokens_per_mb=budget, loss_aggregation=aggregation, fixed_length=16)
        results.append(engine.train_step(group_rows(groups=4), 0, 0))
    for other in results[1:]:
        for name in (
            "loss",
            "grad_norm",
            "entropy",
            "clip_ratio",
            "approx_kl",
            "behave_weight_mean",
            "behave_weight_max",
        ):
            assert other[name] == pytest.approx(results[0][name], rel=1e-5, abs=1e-7), name
    assert results[2]["computed_tokens"] > results[0]["computed_tokens"]


def test_token_mean_and_sequence_mean_differ(make_engine: MakeEngine, group_rows: GroupRows) -> None:
    rows = group_rows(groups=2)
    by = {
        how: make_engine(loss_aggregation=how).train_step(rows, 0, 0)["loss"] for how in ("token_mean", "sequence_mean")
    }
    assert by["token_mean"] != pytest.approx(by["sequence_mean"], rel=1e-3)


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_T073_no_algorithm_s_step_depends_on_micro_batches(
    make_engine: MakeEngine, group_rows: GroupRows, algorithm: str
) -> None:
    graded = [
        with_fields(row, teacher=np.full(len(row.ids) // 4, -2.0, "<f4").tobytes()) for row in group_rows(groups=3)
    ]
    results = []
    for budget in (10_000, 64):
        engine = make_engine(max_tokens_per_mb=budget, algorithm=algorithm, rejection_sampling={"level": "sequence"})
        results.append(engine.train_step(graded, 0, 0))
    for name in ("loss", "grad_norm", "entropy", "clip_ratio", "behave_weight_mean", "screened_tokens"):
        assert results[1][name] == pytest.approx(results[0][name], rel=1e-4, abs=1e-6), name


def test_fixed_length_divides_by_a_constant_and_its_stats_are_means(
    make_engine: MakeEngine, group_rows: GroupRows
) -> None:
    rows = group_rows(groups=2, turns=False)
    fixed, mean = (
        make_engine(loss_aggregation=how, fixed_length=16).train_step(rows, 0, 0)
        for how in ("fixed_length", "token_mean")
    )
    assert fixed["loss"] == pytest.approx(mean["loss"] * mean["trained_tokens"] / (8 * 16), rel=1e-5)
    assert fixed["entropy"] == pytest.approx(mean["entropy"], rel=1e-5)


def test_m2po_leaves_out_the_stalest_tokens_of_the_step(make_engine: MakeEngine, group_rows: GroupRows) -> None:
    rows = group_rows(groups=2)
    loose, tight = (make_engine(algorithm="m2po", m2_threshold=t).train_step(rows, 0, 0) for t in (100.0, 0.5))
    assert loose["screened_tokens"] == 0
    assert 0 < tight["screened_tokens"] < tight["trained_tokens"]
    assert tight["computed_tokens"] == 2 * make_engine().train_step(rows, 0, 0)["computed_tokens"]  # proximal first


def test_loglinear_needs_no_pass_of_its_own_and_says_how_far_the_sampler_is(
    make_engine: MakeEngine, group_rows: GroupRows
) -> None:
    engine = make_engine(prox_logp_method="loglinear", mini_batch_size=3)
    rows = recorded_now(engine, group_rows(groups=2), version=4)
    recompute = make_engine(mini_batch_size=3).train_step(rows, 0, 4)
    fresh = engine.train_step(rows, 0, 4, {4: 0})
    assert fresh["computed_tokens"] < recompute["computed_tokens"]
    assert fresh["logprob_gap_max"] < 1e-5
    assert 0 < fresh["logprob_gap_tokens"] < recompute["logprob_gap_tokens"]  # only before the first update
    for name in ("loss", "approx_kl", "behave_weight_max"):  # at lag 0 the proximal policy is the one that sampled
        assert fresh[name] == pytest.approx(recompute[name], rel=1e-3, abs=1e-5), name
    stale = make_engine(prox_logp_method="loglinear").train_step(group_rows(), 0, 1, {0: 1, 1: 0})
    assert stale["approx_kl"] > 0  # half way between: the ratio is not 1 at the start


def test_a_rejected_token_has_no_gradient(make_engine: MakeEngine, group_rows: GroupRows) -> None:
    stats = make_engine(rejection_sampling={"action": "mask", "upper": 1e-4, "lower": None}).train_step(
        group_rows(), 0, 0
    )
    assert stats["rejected_ratio"] > 0.9
    assert stats["behave_weight_mean"] < 1e-4


def test_rows_without_advantage_are_not_computed_and_change_nothing(
    make_engine: MakeEngine, group_rows: GroupRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = group_rows(groups=2)
    zeros = [with_fields(row, advantages=b"") for row in group_rows(groups=1, seed=9)]
    zeros = [with_fields(row, sequence=100 + row.sequence) for row in zeros]  # type: ignore[arg-type]
    skipping, computing = make_engine(), make_engine()
    monkeypatch.setattr(computing, "_skippable", lambda row: not row.trained.any())
    ours, theirs = skipping.train_step(rows + zeros, 0, 0), computing.train_step(rows + zeros, 0, 0)
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-6)
    assert ours["trained_tokens"] == theirs["trained_tokens"]
    assert ours["skipped_rows"] == len(zeros)
    assert ours["computed_tokens"] < theirs["computed_tokens"]


def test_a_batch_without_any_advantage_takes_no_step(make_engine: MakeEngine, group_rows: GroupRows) -> None:
    engine = make_engine(optimizer={"weight_decay": 0.1})
    engine.train_step(group_rows(), 0, 0)
    before = weights(engine)
    stats = engine.train_step([with_fields(row, advantages=b"") for row in group_rows()], 1, 1)
    assert (stats["updates"], stats["loss"], stats["grad_norm"]) == (0, 0, 0)
    assert_same(weights(engine), before)


def test_T079_recorded_log_probs_of_unchanged_weights_agree(make_engine: MakeEngine, group_rows: GroupRows) -> None:
    engine = make_engine()
    rows = recorded_now(engine, group_rows(groups=3), version=7)
    stats = engine.train_step(rows, 0, 7)
    assert stats["logprob_gap_tokens"] == stats["trained_tokens"]
    assert stats["logprob_gap_max"] < 1e-5
    assert stats["behave_weight_max"] == pytest.approx(1, abs=1e-5)
    after = engine.train_step(rows, 1, 8)  # the weights moved, and so did the version: nothing to compare
    assert after["logprob_gap_tokens"] == 0
    assert after["behave_weight_max"] > 1.001


def test_a_wrong_temperature_shows_as_a_gap(make_engine: MakeEngine, group_rows: GroupRows) -> None:
    engine = make_engine()
    rows = recorded_now(engine, group_rows(), version=0)
    forgot = [with_fields(row, temperatures=np.full(len(row.ids) // 4, 0.5, "<f4").tobytes()) for row in rows]
    assert engine.train_step(forgot, 0, 0)["logprob_gap_max"] > 1e-2


def test_several_mini_batches_step_against_the_policy_at_the_start(
    make_engine: MakeEngine, group_rows: GroupRows
) -> None:
    engine, twin = make_engine(mini_batch_size=3), make_engine(mini_batch_size=3)
    rows = recorded_now(engine, group_rows(groups=2), version=0)
    stats = engine.train_step(rows, 0, 0)
    assert stats["updates"] == 3  # 8 sessions
    assert stats["approx_kl"] > 0  # later mini-batches have moved away from the proximal policy
    assert stats["logprob_gap_max"] < 1e-5  # which is the one that recorded
    proximal = [p.astype("<f4").tobytes() for p in twin.score(rows)]
    twin.train_step([with_fields(row, proximal=p) for row, p in zip(rows, proximal, strict=True)], 0, 0)
    assert_same(weights(engine), weights(twin))


def test_given_proximal_log_probs_are_used(make_engine: MakeEngine, group_rows: GroupRows) -> None:
    rows = group_rows()
    ratio_off = [with_fields(row, proximal=(np.frombuffer(row.logprobs, "<f4") - 9).tobytes()) for row in rows]
    assert make_engine().train_step(ratio_off, 0, 0)["clip_ratio"] > 0.2


def test_the_loss_sinks_when_rewarded_tokens_are_trained_again(make_engine: MakeEngine, make_row: MakeRow) -> None:
    engine = make_engine()
    rows = [
        make_row([3, 4, 5, 6, 7], [3, 4], sequence=0),
        make_row([3, 4, 5, 9, 2], [3, 4], sequence=1, advantage=-1.0),
    ]
    start = [float(p[3:].sum()) for p in engine.score(rows)]
    for step in range(5):
        engine.train_step(recorded_now(engine, rows, step), step, step)
    end = [float(p[3:].sum()) for p in engine.score(rows)]
    assert end[0] > start[0] + 0.5
    assert end[1] < start[1]


@pytest.mark.parametrize("backend", ["fsdp:d1", "archon:d1"])
def test_gradient_checkpointing_changes_memory_not_the_step(
    make_engine: MakeEngine, group_rows: GroupRows, backend: str
) -> None:
    kept: dict[str, int] = {}
    after: dict[str, dict[str, Tensor]] = {}
    for kind in ("none", "selective", "full"):
        engine = make_engine(backend=backend, gradient_checkpointing=kind)
        engine.train_step(group_rows(), 0, 0)
        after[kind], kept[kind] = weights(engine), kept_bytes(engine, group_rows())
    assert_same(after["selective"], after["none"])
    assert_same(after["full"], after["none"])
    assert kept["full"] < 0.5 * kept["none"]
    assert kept["full"] < kept["selective"] < 0.8 * kept["none"]


def kept_bytes(engine: TrainEngine, rows: list[Row]) -> int:
    """What one forward pass leaves allocated for its backward pass."""
    [packed] = pack([decode_row(row) for row in rows], max_tokens=10_000)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        outputs = engine.policy(packed)
    assert outputs[0].requires_grad
    return sum(event.self_cpu_memory_usage for event in profile.key_averages())


def test_bfloat16_keeps_float32_masters(make_engine: MakeEngine, group_rows: GroupRows) -> None:
    engine = make_engine(dtype="bfloat16", optimizer={"lr": 1e-6})
    before = weights(engine)
    for step in range(4):
        engine.train_step(group_rows(), step, step)
    assert all(tensor.dtype == torch.bfloat16 for tensor in weights(engine).values())
    state = engine._optimizer.state_tensors()
    moved = [name for name, tensor in before.items() if not torch.equal(state[f"master.{name}"], tensor.float())]
    assert len(moved) == len(before)  # updates below a bfloat16's resolution are kept


def test_a_non_finite_gradient_names_its_session_and_changes_nothing(
    make_engine: MakeEngine, group_rows: GroupRows
) -> None:
    engine = make_engine(rejection_sampling={"upper": None})
    rows = group_rows()
    n = len(rows[2].ids) // 4
    rows[2] = with_fields(rows[2], advantages=np.full(n, 3e38, "<f4").tobytes())
    before = weights(engine)
    with pytest.raises(
        TrainingError, match=f"session {rows[2].session_id}: its gradient is not finite; the step was not applied"
    ):
        engine.train_step(rows, 0, 0)
    assert_same(weights(engine), before)
    assert engine.train_step(group_rows(), 0, 0)["updates"] == 1


def test_diverged_weights_name_a_session(make_engine: MakeEngine, group_rows: GroupRows) -> None:
    engine = make_engine()
    with torch.no_grad():
        next(iter(dict(engine.policy.trained_parameters()).values()))[:] = float("nan")
    with pytest.raises(TrainingError, match=r"session task\d-\d: the policy's log-prob of token \d+ is nan"):
        engine.train_step(group_rows(), 0, 0)


def test_tokens_of_another_vocabulary_name_a_session(make_engine: MakeEngine, group_rows: GroupRows) -> None:
    engine = make_engine()
    size = engine.policy.vocabulary
    for strange in (size, -1):
        rows = group_rows()
        ids = np.frombuffer(rows[1].ids, "<i4").copy()
        ids[0] = strange
        rows[1] = with_fields(rows[1], ids=ids.tobytes())
        for call in (engine.score, lambda given: engine.train_step(given, 0, 0)):
            with pytest.raises(
                TrainingError, match=f"session {rows[1].session_id}: token id {strange} is none of the model's {size}"
            ):
                call(rows)


def test_an_unknown_algorithm_lists_the_known(make_engine: MakeEngine) -> None:
    with pytest.raises(
        ConfigError, match=r"no algorithm 'sarsa'; known: cispo, dapo, distill, dr_grpo, grpo, gspo, .*, sapo"
    ):
        make_engine(algorithm="sarsa")


def test_a_folder_without_a_model_is_a_sentence(make_engine: MakeEngine, tmp_path: object) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        make_engine(model_dir=str(tmp_path))


def test_T086_the_norm_is_that_of_all_parameters_however_they_are_handed_over_and_the_clipped_one_is_the_bound(
    make_engine: MakeEngine, group_rows: GroupRows
) -> None:
    """A generator of parameters is used up by whoever looks first: here twice, for masters and for clipping."""
    engine = make_engine(optimizer={"lr": 1e-3, "gradient_clipping": 0.1})
    named = dict(engine.policy.trained_parameters())
    optimizer = Optimizer((pair for pair in named.items()), engine.settings.optimizer, total_steps=10)
    gradients = {
        name: torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))) for name, p in named.items()
    }
    for name, p in named.items():
        p.grad = gradients[name].clone()
    norm = torch.sqrt(sum(((g.double() ** 2).sum() for g in gradients.values()), torch.zeros(())))
    handed: list[torch.Tensor] = []
    optimizer._adamw.register_step_pre_hook(
        lambda *_: handed.extend(p.grad.clone() for p in optimizer._masters.values())
    )
    applied = optimizer.step(0)
    assert applied is not None
    assert applied.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    assert torch.nn.utils.get_total_norm(handed).item() == pytest.approx(0.1, rel=1e-4)
