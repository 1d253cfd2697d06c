"""What must hold of every record, whatever a client did: lengths, the tree, rows, and where each sampled token went.

    check_interactions(session, interactions)         # as the store has them
    check_exports(individual, concat)                 # as /rl/export_trajectories answers, in both styles

Used by the property test of random agents and, after every burst, by the fuzzers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from areal.base.types import Interaction, Session
from areal.proxy import export

Place = tuple[str, int]  # a sampled token: its interaction, and its place among that one's tokens


def check_interactions(session: Session, interactions: Sequence[Interaction]) -> None:
    by_id = {one.id: one for one in interactions}
    assert len(by_id) == len(interactions) == session.interaction_count
    for one in interactions:
        completion = one.completion
        count = len(completion.token_ids)
        assert count == len(completion.logprobs) == len(completion.versions) == len(completion.kept_mass)
        assert one.session_id == session.id
        assert len(one.prompt_ids)
        assert np.isfinite(completion.logprobs).all() or "untrainable" in one.tags
        assert (completion.logprobs[np.isfinite(completion.logprobs)] <= 0).all()
        assert completion.finish_reason in ("stop", "length", "tool_calls") or "aborted" in one.tags
        assert one.reward is None or math.isfinite(one.reward)
        assert one.messages
        if one.token_parent is not None:
            parent = by_id[one.token_parent]
            joined = [*parent.prompt_ids.tolist(), *parent.completion.token_ids.tolist()]
            assert one.prompt_ids[: len(joined)].tolist() == joined
            assert one.credit_parent == one.token_parent
        if one.credit_parent is not None:
            assert by_id[one.credit_parent].index < one.index
    account = export.account(interactions)
    assert account.recorded == sum(len(one.completion.token_ids) for one in interactions)
    assert account.recorded == account.trained + sum(account.masked.values())


def check_exports(individual: Any, concat: Any) -> None:
    assert individual["interactions"] == concat["interactions"]
    assert individual["tokens"] == concat["tokens"]
    interactions = {one["id"]: one for one in individual["interactions"]}
    wanted = {
        (name, place) for name, one in interactions.items() for place, trained in enumerate(one["loss_mask"]) if trained
    }
    tokens = individual["tokens"]
    dropped = sum(tokens["dropped"].values())
    assert tokens["recorded"] == sum(len(one["output_ids"]) for one in interactions.values())
    assert tokens["recorded"] == tokens["trained"] + sum(tokens["masked"].values()) + dropped
    assert tokens["trained"] == (0 if dropped else len(wanted))  # of a session that is dropped nothing is trained
    apart = [_row(row, interactions) for row in individual["trajectories"]]
    joined = [_row(row, interactions) for row in concat["trajectories"]]
    for rows in (apart, joined):
        places = [place for row in rows for place in row]
        assert len(places) == len(set(places))  # trained once
        assert set(places) == wanted  # and everything that is to be trained
    assert _told(apart) == _told(joined)
    assert all(len(row["spans"]) == 1 for row in individual["trajectories"])
    _check_paths(concat["trajectories"], interactions)


def _row(row: Any, interactions: dict[str, Any]) -> dict[Place, tuple[Any, ...]]:
    """Checks one row; what it says of each token that it trains."""
    length = len(row["token_ids"])
    names = ("loss_mask", "logprobs", "versions", "temperatures")
    assert all(len(row[name]) == length for name in names)
    assert any(row["loss_mask"])
    found: dict[Place, tuple[Any, ...]] = {}
    end = 0
    for span in row["spans"]:
        one = interactions[span["interaction_id"]]
        assert row["token_ids"][: span["start"]] == one["prompt_ids"]  # the whole way from the root to this answer
        assert row["token_ids"][span["start"] : span["end"]] == one["output_ids"]
        assert not any(row["loss_mask"][end : span["start"]])
        assert set(row["versions"][end : span["start"]]) <= {-1}
        assert not any(row["logprobs"][end : span["start"]])
        for place, (token, logprob, version, trained) in enumerate(
            zip(one["output_ids"], one["logprobs"], one["versions"], one["loss_mask"], strict=True)
        ):
            at = span["start"] + place
            assert row["loss_mask"][at] == trained
            assert row["versions"][at] == version
            assert row["logprobs"][at] == (0.0 if logprob is None else logprob)
            if trained:
                assert logprob is not None
                assert row["temperatures"][at] == np.float32(one["temperature"])
                found[one["id"], place] = (token, logprob, version, row["temperatures"][at], span["reward"])
        assert span["reward"] == one["discounted_reward"]
        end = span["end"]
    assert end == length  # a row ends with an answer: a leaf
    return found


def _told(rows: list[dict[Place, tuple[Any, ...]]]) -> dict[Place, tuple[Any, ...]]:
    return {place: said for row in rows for place, said in row.items()}


def _check_paths(rows: Any, interactions: dict[str, Any]) -> None:
    """No row begins where another one could have gone on, so each is a path from the root to a leaf."""
    for row in rows:
        first = interactions[row["spans"][0]["interaction_id"]]
        for other in rows:
            before = [span for span in other["spans"] if interactions[span["interaction_id"]]["index"] < first["index"]]
            if other is row or not before:
                continue
            ended = other["token_ids"][: before[-1]["end"]]
            assert first["prompt_ids"][: len(ended)] != ended
