"""What must hold of every agent's exported session: each sampled token stands in it once, as it was sampled.

check_tokens(record, play.sampled(vocabulary))         # whatever the agent did to its history
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.clients.live_run import Record


def check_tokens(record: Record, sampled: list[list[int]] | None) -> None:
    """The rows partition the sampled tokens. sampled: the ids of the script's answers, where there is a script; an answer
    that was cut off is the beginning of one."""
    outputs = {one["id"]: one for one in record.interactions}
    if sampled is not None:
        for one in record.interactions:
            ids = one["output_ids"]
            assert any(answer[: len(ids)] == ids for answer in sampled), f"{one['id']} is none of the script's answers"
    places: Counter[str] = Counter()
    for row in record.rows:
        inside = [False] * len(row["token_ids"])
        for span in row["spans"]:
            one = outputs[span["interaction_id"]]
            here = slice(span["start"], span["end"])
            assert row["token_ids"][here] == one["output_ids"], "a row holds other ids than were sampled"
            assert row["loss_mask"][here] == one["loss_mask"]
            assert row["token_ids"][: span["start"]] == one["prompt_ids"], (
                "a row is another prompt than was sampled from"
            )
            if any(one["loss_mask"]):
                assert row["logprobs"][here] == one["logprobs"], "log-probs stand on other tokens"
            inside[here] = [True] * len(one["output_ids"])
            places[one["id"]] += 1
        stray = [k for k, mask in enumerate(row["loss_mask"]) if mask and not inside[k]]
        assert not stray, f"tokens {stray} are trained and were not sampled"
    for one in record.interactions:
        assert places[one["id"]] == 1 or (places[one["id"]] == 0 and not any(one["loss_mask"])), one["id"]
    _check_sums(record)
    _check_continuations(outputs)


def _check_sums(record: Record) -> None:
    """recorded = trained + masked + dropped. A run without a model to train drops every session in the end."""
    tokens = record.export["tokens"]
    masked, dropped = sum(tokens["masked"].values()), sum(tokens["dropped"].values())
    assert tokens["recorded"] == sum(len(one["output_ids"]) for one in record.interactions)
    assert tokens["recorded"] == tokens["trained"] + masked + dropped
    in_rows = sum(sum(row["loss_mask"]) for row in record.rows)
    assert in_rows == sum(sum(one["loss_mask"]) for one in record.interactions)
    if not dropped:
        assert tokens["trained"] == in_rows


def _check_continuations(outputs: dict[str, dict[str, Any]]) -> None:
    """What continues a turn begins with that turn's own ids; what begins a branch says why."""
    for one in outputs.values():
        parent = outputs.get(one["token_parent"] or "")
        if parent is not None:
            before = parent["prompt_ids"] + parent["output_ids"]
            assert one["prompt_ids"][: len(before)] == before, "a recorded answer was tokenised again"
        elif one["index"]:
            assert one["branch_reason"], f"{one['id']} begins a branch for no reason"
