"""All keys stand in one frozen list, so that a new knob shows in the diff and has to earn its place."""

from __future__ import annotations

from pathlib import Path

from areal.config.document import document
from areal.config.keys import keys_of, paths_of
from areal.config.run import RunConfig

MOST_KEYS = 230


def test_the_keys_are_the_frozen_ones() -> None:
    frozen = (Path(__file__).parent / "keys.txt").read_text().split()
    assert sorted(keys_of(RunConfig)) == frozen, "a key came or went: write it into (or out of) tests/config/keys.txt"
    assert len(frozen) <= MOST_KEYS


def test_secrets_are_marked() -> None:
    secrets = {key.path for key in keys_of(RunConfig).values() if key.secret}
    keys = {"rollout.agent.admin_api_key", "rollout.agent.internal_token", "api_gateway.api_key"}
    assert secrets == keys | {"store.url"}  # it may hold a password
    named_like_one = {path for path in keys_of(RunConfig) if path.endswith(("_token", "_key", "password", "secret"))}
    assert named_like_one - {"rollout.agent.reward_key"} == keys


def test_no_key_is_a_section_too() -> None:
    assert not {
        path for path in keys_of(RunConfig) if any(other.startswith(f"{path}.") for other in paths_of(RunConfig))
    }


def test_the_page_of_all_keys_is_up_to_date() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "config.md"
    assert page.read_text() == document(), "run: python -m areal.config.document > docs/config.md"
