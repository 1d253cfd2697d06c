"""What a reward source needs and which of its keys it would not read, said before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areal.config.reward import RewardConfig
from areal.config.rewarded import _OF_FUNCTIONS, _OF_MODELS, parser_of, reward_problems
from areal.config.run import RunConfig

CHANNEL: dict[str, Any] = {
    "api_gateway": {"base_url": "http://localhost:1", "api_key": "k"},
    "model_routing": {"reward_model": {"model_id": "rm"}, "judge_model": {"model_id": "jm"}},
}


def config(
    source: str, *, n_samples: int = 1, held_out: str | None = None, channel: dict[str, Any] = CHANNEL, **reward: Any
) -> RunConfig:
    run = {
        "rollout": {"agent": {"reward_source": source}, "reward": reward},
        "gconfig": {"n_samples": n_samples},
        "evaluator": {"path": held_out},
    }
    return RunConfig.model_validate(run | channel)


def test_what_is_whole_has_no_problem() -> None:
    for source in ("client", "reward_model", "judge_model"):
        assert reward_problems(config(source)) == []
    assert reward_problems(config("function", path="m:f", channel={})) == []
    assert reward_problems(config("judge_model", n_samples=2, relative=True, rubric="short", held_out="t.jsonl")) == []
    assert reward_problems(config("judge_model", n_samples=2, relative=True, prompt="{answers}")) == []
    assert [parser_of(config(one)) for one in ("reward_model", "judge_model")] == ["number", "verdict"]


@pytest.mark.parametrize("key", sorted(RewardConfig.model_fields))
def test_every_key_is_refused_where_clients_reward(key: str) -> None:
    values: dict[str, Any] = {"path": "m:f", "parser": "json", "bounds": [0, 2], "good": ["ja"], "bad": ["nein"]}
    values |= {"clip": True, "relative": True, "environment": ["A"], "memory_mb": 64}
    value = values.get(key, "text" if key in ("rubric", "prompt", "prompt_path", "field") else 7)
    [problem] = reward_problems(config("client", **{key: value}))
    assert problem.startswith(f"rollout.reward.{key} is read by nobody")
    elsewhere = {name: value for name, value in {key: value}.items() if name in (*_OF_MODELS, *_OF_FUNCTIONS)}
    if elsewhere:
        wrong = "function" if key in _OF_MODELS else "judge_model"
        needed = {"path": "m:f"} if wrong == "function" else {}
        assert any(
            f"rollout.reward.{key} is read by nobody" in one
            for one in reward_problems(config(wrong, **(needed | elsewhere)))
        )


@pytest.mark.parametrize(
    ("source", "settings", "says"),
    [
        ("reward_model", {"channel": {}}, "model_routing.reward_model says nothing about it; add the route"),
        ("function", {}, "name it in rollout.reward.path, as module:attribute"),
        ("judge_model", {"relative": True}, "gconfig.n_samples=1 makes groups of one"),
        ("judge_model", {"relative": True, "n_samples": 2, "parser": "number"}, "several answers is read as json".replace("is", "are")),
        ("judge_model", {"relative": True, "n_samples": 2, "prompt": "{answers}", "held_out": "t.jsonl"}, "a held-out task has one answer"),
        ("judge_model", {"parser": "number", "good": ["ja"]}, "rollout.reward.good is read by nobody: its answers are read as number"),
        ("reward_model", {"bounds": [1, 0]}, "must be [lowest, highest]"),
        ("reward_model", {"bounds": [1]}, "must be [lowest, highest]"),
        ("reward_model", {"scale": 0}, "makes every reward the same"),
        ("judge_model", {"good": ["Yes"], "bad": ["yes"]}, "both hold 'yes'"),
        ("judge_model", {"bad": []}, "must both hold a word"),
        ("judge_model", {"prompt": "{anser}"}, "did you mean {answer}"),
        ("judge_model", {"prompt": "{task}"}, "shows the judge nothing of what it judges"),
        ("judge_model", {"prompt": "{answer}", "rubric": "r"}, "your prompt has no {rubric}"),
        ("judge_model", {"prompt": "{answer}", "prompt_path": "x"}, "take one out"),
        ("judge_model", {"prompt_path": "/nowhere.txt"}, "cannot be read"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_said_with_its_remedy(source: str, settings: dict[str, Any], says: str) -> None:
    problems = reward_problems(config(source, **settings))
    assert any(says in problem for problem in problems), problems


def test_late_rewards_of_clients_are_not_waited_for() -> None:
    run = RunConfig.model_validate(
        {"rollout": {"agent": {"reward_source": "function", "reward_grace_seconds": 5}, "reward": {"path": "m:f"}}}
    )
    assert "reward_grace_seconds=5: function rewards after the end" in reward_problems(run)[0]


def test_a_prompt_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text('Judge {answer}: {"score": N}')
    assert reward_problems(config("reward_model", prompt_path=str(path))) == []
