"""Export: discounting, rows and the account of tokens, on hand-made and on random token trees."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.base.types import Completion, Interaction, Message, Session, Share, Tag
from areal.proxy import export

SESSION = Session("t-0", "t", "g", 0, "hash", "w0", "train", {}, 0.0, 0.0)


def turn(
    index: int,
    prompt: list[int],
    out: list[int],
    *,
    reward: float | None = None,
    credit: int | None = None,
    token: int | None = None,
    tags: tuple[Tag, ...] = (),
    temperature: float = 1.0,
) -> Interaction:
    completion = Completion(
        token_ids=np.array(out, np.int32),
        logprobs=np.array([-(index + 1) - k / 100 for k in range(len(out))], np.float32),
        versions=np.full(len(out), index, np.int32),
        kept_mass=np.ones(len(out), np.float32),
        temperature=temperature,
        finish_reason="stop",
    )
    return Interaction(
        id=f"i{index}",
        session_id=SESSION.id,
        index=index,
        prompt_ids=np.array(prompt, np.int32),
        completion=completion,
        messages=(Message("user", "x"),),
        reply=Message("assistant", "y"),
        credit_parent=None if credit is None else f"i{credit}",
        token_parent=None if token is None else f"i{token}",
        reward=reward,
        tags=tags,
    )


def chain(rewards: list[float | None]) -> list[Interaction]:
    return [turn(i, [1, i], [2], reward=r, credit=i - 1 if i else None) for i, r in enumerate(rewards)]


@pytest.mark.parametrize(
    ("rewards", "discount", "expected"),
    [
        ([None, None, 1.0], 0.5, [0.25, 0.5, 1.0]),
        ([-0.2, None, 1.0], 0.5, [0.05, 0.5, 1.0]),
        ([None, None, 1.0], 1.0, [1.0, 1.0, 1.0]),
        ([-0.2, None, 1.0], 0.0, [-0.2, 0.0, 1.0]),
    ],
)
def test_T044_T045_discount_runs_over_the_chain_and_twice_gives_the_same(
    rewards: list[float | None], discount: float, expected: list[float]
) -> None:
    interactions = chain(rewards)
    for _ in range(2):
        assert list(export.discounted_rewards(interactions, discount).values()) == pytest.approx(expected)
        table = export.rows(SESSION, interactions, "individual", discount)
        assert [row.spans[0].raw_reward for row in table] == rewards
        assert [row.spans[0].reward for row in table] == pytest.approx(expected)


def test_each_reward_is_clipped_before_it_is_discounted() -> None:
    chain = [
        turn(0, [1], [2], reward=-9.0),
        turn(1, [1, 2], [3], reward=9.0, credit=0),
        turn(2, [1, 2, 3], [4], credit=1),
    ]
    assert export.discounted_rewards(chain, 0.5, reward_clip=2.0) == {"i0": -1.0, "i1": 2.0, "i2": 0.0}
    [first, *_] = export.rows(SESSION, chain, "individual", 0.5, 2.0)
    assert (first.spans[0].raw_reward, first.spans[0].reward) == (-9.0, -1.0)


def test_a_fork_gives_the_parent_the_mean_and_superseded_answers_do_not_dilute_it() -> None:
    interactions = [
        turn(0, [1], [2]),
        turn(1, [1, 2, 3], [4], reward=1.0, credit=0),
        turn(2, [1, 2, 3], [5], reward=0.0, credit=0),
        turn(3, [1, 2, 3], [6], credit=0, tags=("superseded",)),
        turn(4, [9], [9], reward=5.0, tags=("side_request",)),
    ]
    assert export.discounted_rewards(interactions, 1.0)["i0"] == pytest.approx(0.5)


def test_a_superseded_answer_that_was_continued_after_all_is_a_step() -> None:
    interactions = [
        turn(0, [1], [2]),
        turn(1, [1, 2, 3], [4], credit=0, tags=("superseded",)),
        turn(2, [1, 2, 3, 4, 5], [6], credit=1, reward=1.0),
    ]
    assert export.discounted_rewards(interactions, 1.0)["i0"] == pytest.approx(1.0)


def test_T057_two_agents_in_one_session_make_two_rows() -> None:
    interactions = [turn(0, [1, 2], [3]), turn(1, [9], [8]), turn(2, [1, 2, 3, 4], [5]), turn(3, [9, 8, 7], [6])]
    table = export.rows(SESSION, interactions, "concat", 1.0)
    assert [row.token_ids.tolist() for row in table] == [[1, 2, 3, 4, 5], [9, 8, 7, 6]]
    assert [row.trained.astype(int).tolist() for row in table] == [[0, 0, 1, 0, 1], [0, 1, 0, 1]]
    assert [[span.interaction_id for span in row.spans] for row in table] == [["i0", "i2"], ["i1", "i3"]]
    assert table[0].versions.tolist() == [-1, -1, 0, -1, 2]
    assert len(export.rows(SESSION, interactions, "individual", 1.0)) == 4


def test_T056_the_end_token_is_trained() -> None:
    (row,) = export.rows(SESSION, [turn(0, [5], [11, 12, 2])], "individual", 1.0)
    assert row.trained.tolist() == [False, True, True, True]


def test_T058_rows_without_a_token_to_train_are_left_out_and_counted() -> None:
    interactions = [turn(0, [1], []), turn(1, [1], [3], tags=("greedy",), temperature=0.0)]
    assert export.rows(SESSION, interactions, "individual", 1.0) == []
    assert export.rows(SESSION, interactions, "concat", 1.0) == []
    assert export.account(interactions) == export.Account(recorded=1, trained=0, masked={"greedy": 1}, empty=2)


def test_T054_missing_logprobs_stay_masked_and_never_nan_in_a_row() -> None:
    broken = turn(0, [1], [2, 3], tags=("untrainable",))
    broken.completion.logprobs[1] = np.nan
    interactions = [broken, turn(1, [1, 2, 3, 4], [5], credit=0)]
    (row,) = export.rows(SESSION, interactions, "concat", 1.0)
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert row.trained.tolist() == [False, False, False, False, True]
    assert np.isfinite(row.logprobs).all()
    without_ids = turn(2, [], [7], tags=("untrainable",))
    assert len(export.rows(SESSION, [*interactions, without_ids], "concat", 1.0)) == 1


def test_constrained_tokens_are_masked_one_by_one() -> None:
    plain = turn(0, [1], [2, 3, 4], tags=("constrained",))
    completion = replace(plain.completion, constrained=np.array([True, False, True]))
    (row,) = export.rows(SESSION, [replace(plain, completion=completion)], "individual", 1.0)
    assert row.trained.tolist() == [False, False, True, False]
    assert export.account([replace(plain, completion=completion)]).masked == {"constrained": 2}


def test_a_step_writes_down_each_interaction_once() -> None:
    forced = turn(1, [1], [2, 3, 4])
    forced = replace(forced, completion=replace(forced.completion, constrained=np.array([True, False, True])))
    fates = [
        export.fate(one)
        for one in (turn(0, [1], [2, 3]), forced, turn(2, [1], [5], tags=("greedy",)), turn(3, [1], []))
    ]
    assert export.shares(fates, {}) == {
        "": Share(3, 2),
        "constrained": Share(2, 0),
        "empty": Share(0, 1),
        "greedy": Share(1, 1),
    }
    assert export.shares(fates, {"i0": 1, "i1": 1}) == {
        "": Share(1, 1),
        "constrained": Share(2, 0),
        "empty": Share(0, 1),
        "greedy": Share(1, 1),
        "stale": Share(2, 1),
    }


def test_among_equal_rows_the_token_parents_is_extended() -> None:
    interactions = [turn(0, [1], [2]), turn(1, [1], [2]), turn(2, [1, 2, 3], [4], token=0)]
    table = export.rows(SESSION, interactions, "concat", 1.0)
    assert [[span.interaction_id for span in row.spans] for row in table] == [["i0", "i2"], ["i1"]]


TAGS: list[tuple[Tag, ...]] = [(), (), (), ("aborted",), ("greedy",), ("superseded", "aborted"), ("side_request",)]


@st.composite
def token_trees(draw: st.DrawFn) -> list[Interaction]:
    """Sessions over a two-letter vocabulary, so that chance prefixes, forks and equal rows are common."""
    token = st.integers(1, 2)
    interactions: list[Interaction] = []
    for index in range(draw(st.integers(0, 8))):
        parent = draw(st.none() | st.integers(0, index - 1)) if index else None
        news = draw(st.lists(token, min_size=1, max_size=3))
        prompt = news
        if parent is not None:
            one = interactions[parent]
            prompt = [*one.prompt_ids.tolist(), *one.completion.token_ids.tolist(), *news]
        out = draw(st.lists(token, max_size=4))
        reward = draw(st.none() | st.floats(-2, 2))
        interactions.append(
            turn(index, prompt, out, reward=reward, credit=parent, token=parent, tags=draw(st.sampled_from(TAGS)))
        )
    return interactions


@given(token_trees())
def test_every_sampled_unmasked_token_is_trained_exactly_once_in_both_styles(interactions: list[Interaction]) -> None:
    account = export.account(interactions)
    assert account.recorded == account.trained + sum(account.masked.values())
    by_id = {one.id: one for one in interactions}
    for style in ("individual", "concat"):
        table = export.rows(SESSION, interactions, style, 0.9)  # type: ignore[arg-type]
        assert sum(int(row.trained.sum()) for row in table) == account.trained
        seen: list[str] = []
        for row in table:
            for span in row.spans:
                one = by_id[span.interaction_id]
                assert row.token_ids[: span.start].tolist() == one.prompt_ids.tolist()
                assert row.token_ids[span.start : span.end].tolist() == one.completion.token_ids.tolist()
                assert row.logprobs[span.start : span.end].tolist() == one.completion.logprobs.tolist()
                assert row.versions[span.start : span.end].tolist() == one.completion.versions.tolist()
                assert span.trained == bool(row.trained[span.start : span.end].any())
                seen.append(one.id)
        assert len(seen) == len(set(seen))
        assert {one.id for one in interactions if export.trained_mask(one).any()} <= set(seen)


@given(token_trees(), st.floats(0, 1))
def test_returns_equal_the_recursive_definition(interactions: list[Interaction], discount: float) -> None:
    def naive(one: Interaction) -> float:
        children = [kid for kid in interactions if kid.credit_parent == one.id and is_step(kid)]
        later = sum(naive(kid) for kid in children) / len(children) if children else 0.0
        return (one.reward or 0.0) + discount * later

    def is_step(one: Interaction) -> bool:
        return not export.NOT_A_STEP & set(one.tags) or any(
            is_step(kid) for kid in interactions if kid.credit_parent == one.id
        )

    returns = export.discounted_rewards(interactions, discount)
    assert returns == pytest.approx({one.id: naive(one) for one in interactions})
