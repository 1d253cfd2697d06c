"""Agents that the service runs itself, on the same path as everyone else's: a base URL, a key, HTTP.

    agent = load_agent("examples.math_agent.agent:MathAgent")
    reward = await agent.run(task, base_url="http://127.0.0.1:41873/v1", api_key="sk-sess-...")

An agent is any object with `async run(task, *, base_url, api_key)` that returns its reward: a number for the last
interaction, or {interaction id: number}, or None where it set rewards itself. A class is instantiated without arguments. An agent that
raises is data, not a crash: its session ends as reward_failed and is counted. Which agents a worker runs is agent_choice.py's.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any, Protocol

from areal.base.errors import BadRequest, ConfigError
from areal.rollout.targets import load_target

Reward = float | Mapping[str, float] | None


class Agent(Protocol):
    async def run(self, task: dict[str, Any], *, base_url: str, api_key: str) -> Reward: ...


def load_agent(path: str, key: str = "rollout.agent.path") -> Agent:
    """The agent at `module:attribute`, to be run in this process. key: the configuration's name for it. Raises ConfigError saying which
    half is wrong, or that it would stop everything else here."""
    agent = load_target(path, key)
    run = getattr(agent, "run", None)
    if run is None:
        raise ConfigError(f"{key}: {path} has no `async run(task, *, base_url, api_key)`")
    if inspect.isroutine(run) and not inspect.iscoroutinefunction(inspect.unwrap(run)):
        raise ConfigError(
            f"{key}: run of {path} is a plain function, which would stop all other sessions while it waits; make it `async def`, or set "
            "rollout.agent.mode=subproc"
        )
    return agent  # type: ignore[no-any-return]


def rewards_of(result: object) -> dict[str | None, float]:
    """What an agent returned, as {interaction id or None: reward}. Raises BadRequest for anything that is no reward."""
    if result is None:
        return {}
    items: Mapping[Any, Any] = result if isinstance(result, Mapping) else {None: result}
    for name, value in items.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise BadRequest(f"the agent returned {value!r} as reward of {name or 'the last answer'}; return a number")
    return {name: float(value) for name, value in items.items()}
