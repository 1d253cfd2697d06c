"""A run's config.yaml as it was written down, beside the configuration that a later start has."""

from __future__ import annotations

from pathlib import Path

from areal.config.load import resolve
from areal.config.recorded import Recorded
from areal.config.run import RunConfig
from areal.config.show import masked_yaml


def config_of(*overrides: str) -> RunConfig:
    return resolve(None, list(overrides)).config


def recorded(path: Path, config: RunConfig) -> Recorded:
    path.write_text(masked_yaml(config))
    return Recorded.of(path)


def test_what_a_later_start_has_otherwise_is_named_with_both_values(tmp_path: Path) -> None:
    first = config_of("actor.optimizer.lr=1e-4", "rollout.agent.admin_api_key=the-first-secret-of-alice")
    before = recorded(tmp_path / "config.yaml", first)
    assert before.changes(first) == []
    now = config_of(
        "actor.optimizer.lr=1e-3",
        "rollout.queue_size=32",
        "critic.path=tiny-qwen3",
        "rollout.agent.admin_api_key=another-secret-of-bob-and-eve",
    )
    changes = before.changes(now)
    assert {"actor.optimizer.lr=0.001, was 0.0001", "critic=set, was null", "rollout.queue_size=32, was null"} < set(
        changes
    )
    [secret] = [change for change in changes if change.startswith("rollout.agent.admin_api_key=")]
    assert len(changes) == 4
    assert "secret" not in secret.partition("=")[2]


def test_without_a_former_start_or_with_one_of_another_release_only_what_both_know_is_compared(tmp_path: Path) -> None:
    assert Recorded.of(tmp_path / "none.yaml").changes(config_of()) == []
    (tmp_path / "config.yaml").write_text("seed: 2\nof_another_release: 3\ncritic: null\n")
    assert Recorded.of(tmp_path / "config.yaml").changes(config_of()) == ["seed=1, was 2"]
