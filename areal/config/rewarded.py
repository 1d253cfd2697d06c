"""Which keys of `rollout.reward` the chosen reward source honours, and what it needs besides.

    reward_problems(config)        # one sentence each, for startable.py

A key that the source would not read is an error, never silence: somebody who wrote it expects it to do something.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from areal.base.errors import ConfigError
from areal.base.template import Template
from areal.config.reward import Parser, RewardConfig
from areal.config.run import RunConfig

MODELS = ("reward_model", "judge_model")
SLOTS = ("task", "task.*", "task_id", "conversation", "messages", "answer", "rubric", "low", "high")
RELATIVE_SLOTS = ("task", "task.*", "task_id", "conversation", "answers", "count", "rubric", "low", "high")

_OF_MODELS = ("rubric", "prompt", "prompt_path", "parser", "field", "good", "bad", "relative", "cache_size")
_OF_FUNCTIONS = ("path", "memory_mb", "environment")
_OF_PARSERS: dict[Parser, tuple[str, ...]] = {"number": (), "verdict": ("good", "bad"), "json": ("field",)}


def reward_problems(config: RunConfig) -> list[str]:
    """Empty where the sessions of this configuration can be rewarded as it says."""
    source, reward = config.rollout.agent.reward_source, config.rollout.reward
    given = _given(reward)
    if source == "client":
        return [_vain(key, "clients set their rewards with /rl/set_reward", "reward_source") for key in given]
    found = _numbers(reward)
    if config.rollout.agent.reward_grace_seconds:
        found.append(
            f"rollout.agent.reward_grace_seconds={config.rollout.agent.reward_grace_seconds:g}: {source} rewards after the end, so no "
            "client's late reward is waited for; take it out"
        )
    if source in MODELS:
        return found + _of_a_model(config, given)
    found += [_vain(key, "a function rewards, no model", "reward_source") for key in given if key in _OF_MODELS]
    if not reward.path:
        found.append("rollout.agent.reward_source=function: name it in rollout.reward.path, as module:attribute")
    return found


def parser_of(config: RunConfig) -> Parser:
    """How a model's answer is read."""
    reward = config.rollout.reward
    by_itself: Parser = "number" if config.rollout.agent.reward_source == "reward_model" else "verdict"
    return reward.parser or ("json" if reward.relative else by_itself)


def prompt_of(reward: RewardConfig) -> Template | None:
    """The user's own prompt. Raises ConfigError for a file that is not there and for slots that stand for nothing."""
    text, key = reward.prompt, "rollout.reward.prompt"
    if reward.prompt_path is not None:
        key = "rollout.reward.prompt_path"
        try:
            text = Path(reward.prompt_path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{key}={reward.prompt_path} cannot be read ({error}); name a text file, UTF-8"
            ) from error
    return None if text is None else Template(text, RELATIVE_SLOTS if reward.relative else SLOTS, key=key)


def _of_a_model(config: RunConfig, given: Collection[str]) -> list[str]:
    source, reward, parser = config.rollout.agent.reward_source, config.rollout.reward, parser_of(config)
    found = [_vain(key, f"{source} rewards, no function", "reward_source") for key in given if key in _OF_FUNCTIONS]
    unread = {key for keys in _OF_PARSERS.values() for key in keys} - set(_OF_PARSERS[parser])
    found += [_vain(key, f"its answers are read as {parser}", "reward.parser") for key in sorted(unread & set(given))]
    if getattr(config.model_routing, source, None) is None:
        found.append(
            f"rollout.agent.reward_source={source}: model_routing.{source} says nothing about it; add the route with its model_id, and "
            "api_gateway (or name a router file in agent.gateway_config)"
        )
    if reward.relative and config.gconfig.n_samples < 2:
        found.append(
            f"rollout.reward.relative=true: compares the answers of a group, and gconfig.n_samples={config.gconfig.n_samples} makes groups "
            "of one; raise it, or take relative out"
        )
    if reward.relative and parser != "json":
        found.append(
            f"rollout.reward.parser={parser}: scores of several answers are read as json; take parser or relative out"
        )
    if reward.relative and config.evaluator.path and (reward.prompt is not None or reward.prompt_path is not None):
        found.append(
            "rollout.reward.relative=true: a held-out task has one answer, and your prompt compares several; say what is good in "
            "rollout.reward.rubric in place of the prompt, or set evaluator.path=null"
        )
    return found + _prompt_problems(reward)


def _prompt_problems(reward: RewardConfig) -> list[str]:
    if reward.prompt is not None and reward.prompt_path is not None:
        return ["rollout.reward.prompt and prompt_path both hold a prompt; take one out"]
    try:
        prompt = prompt_of(reward)
    except ConfigError as error:
        return [str(error)]
    if prompt is None:
        return []
    found = []
    if not prompt.slots & {"answer", "answers", "conversation", "messages"}:
        needed = "{answers}" if reward.relative else "{answer}, {conversation} or {messages}"
        found.append(f"rollout.reward.prompt shows the judge nothing of what it judges; put {needed} into it")
    if reward.rubric is not None and "rubric" not in prompt.slots:
        found.append("rollout.reward.rubric: your prompt has no {rubric} for it; put it in, or take rubric out")
    return found


def _numbers(reward: RewardConfig) -> list[str]:
    found = []
    bounds = reward.bounds
    if bounds is not None and (len(bounds) != 2 or not bounds[0] < bounds[1]):
        found.append(f"rollout.reward.bounds={bounds} must be [lowest, highest], two numbers in that order")
    if reward.scale == 0:
        found.append("rollout.reward.scale=0 makes every reward the same; set another one")
    overlap = sorted({word.lower() for word in reward.good} & {word.lower() for word in reward.bad})
    if overlap or not reward.good or not reward.bad:
        what = f"both hold {overlap[0]!r}" if overlap else "must both hold a word"
        found.append(f"rollout.reward.good and bad {what}; a verdict is one or the other")
    return found


def _given(reward: RewardConfig) -> list[str]:
    """The keys that stand somewhere else than at their default."""
    default = RewardConfig()
    return [name for name in RewardConfig.model_fields if getattr(reward, name) != getattr(default, name)]


def _vain(key: str, because: str, other: str) -> str:
    where = f"rollout.{other}" if other.startswith("reward.") else f"rollout.agent.{other}"
    return f"rollout.reward.{key} is read by nobody: {because}; take it out, or set {where}"
