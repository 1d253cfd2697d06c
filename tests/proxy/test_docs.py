"""docs/http.md names every field, tag and branch reason that the proxy knows."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from areal.base.types import BranchReason
from areal.proxy.dialects import anthropic_messages, openai_chat, openai_responses
from areal.proxy.export import MASK_ORDER

TEXT = (Path(__file__).parents[2] / "docs" / "http.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("protocol", "known"),
    [
        ("chat", openai_chat.KNOWN),
        ("Responses", openai_responses.KNOWN),
        ("Messages", anthropic_messages.KNOWN),
    ],
)
def test_every_known_field_is_documented(protocol: str, known: frozenset[str]) -> None:
    section = TEXT.partition(f"## Fields of a {protocol} call")[2].partition("\n## ")[0]
    assert [field for field in sorted(known) if f"`{field}`" not in section] == []


def test_every_tag_that_the_proxy_sets_is_documented() -> None:
    set_here = [tag for tag in MASK_ORDER if tag != "scripted_history"]
    assert [tag for tag in set_here if f"`{tag}`" not in TEXT] == []


def test_every_branch_reason_is_documented() -> None:
    section = TEXT.partition("## Rows, branches and the merge rate")[2]
    assert [reason for reason in get_args(BranchReason) if f"\n| `{reason}` |" not in section] == []
