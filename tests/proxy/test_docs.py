"""docs/http.md names every field, tag and branch reason that the proxy knows."""

from __future__ import annotations

from pathlib import Path

from areal.proxy import conversation
from areal.proxy.dialects import openai_chat
from areal.proxy.export import MASK_ORDER

TEXT = (Path(__file__).parents[2] / "docs" / "http.md").read_text("utf-8")


def test_every_known_field_is_documented() -> None:
    assert [field for field in sorted(openai_chat.KNOWN) if f"`{field}`" not in TEXT] == []


def test_every_tag_that_the_proxy_sets_is_documented() -> None:
    set_here = [tag for tag in MASK_ORDER if tag not in ("constrained", "scripted_history")]
    assert [tag for tag in set_here if f"`{tag}`" not in TEXT] == []


def test_every_branch_reason_is_documented() -> None:
    source = Path(conversation.__file__).read_text("utf-8")
    reasons = [word for word in ("new_conversation", "history_changed", "tools_changed", "resampled") if word in source]
    assert len(reasons) == 4
    assert all(f"`{reason}`" in TEXT for reason in reasons)
