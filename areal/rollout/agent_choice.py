"""Which agents a worker runs, and where: in its own loop, in a pool of processes, as a program, or as a framework's driver says.

    agents = agents_of(config)                      # {"train": agent, "eval": agent}; only those that are wanted
    async with PooledAgent(config, path, key): ...  # the one kind that must be opened

The rule, in words, stands in config/own_agents.py, which refuses what does not go together. Agents are loaded here, so a wrong path is an
error before any session. Used by agent_runs.py.
"""

from __future__ import annotations

from typing import Any, Self

from areal.base.types import Purpose
from areal.cluster.program import clean_environment
from areal.config.commands import split_command
from areal.config.own_agents import runs_agents
from areal.config.run import RunConfig
from areal.rollout.agent_output import Spoken, speaking
from areal.rollout.agents import Agent, Reward, load_agent
from areal.rollout.frameworks import FRAMEWORKS
from areal.rollout.pool import ProcessPool
from areal.rollout.programs import ProgramAgent, ProgramSettings
from areal.rollout.targets import load_target

OWN, EVAL = "rollout.agent.path", "evaluator.agent"


class PooledAgent:
    """An agent of mode subproc: `run` of an object, plain or async, in processes of its own."""

    def __init__(self, config: RunConfig, path: str, key: str) -> None:
        process = config.rollout.agent.process
        self.path = path
        self._pool = ProcessPool(
            path,
            key=key,
            method="run",
            size=process.max_running,
            timeout_s=process.timeout_seconds,
            memory_mb=process.memory_mb,
            environment=clean_environment(process.environment),
            say=lambda line: Spoken(speaking.get()).line(line),
        )

    async def __aenter__(self) -> Self:
        await self._pool.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._pool.__aexit__(*exc)

    async def run(self, task: dict[str, Any], *, base_url: str, api_key: str) -> Reward:
        """Raises CallFailed."""
        spoken = Spoken(speaking.get())
        result: Reward = await self._pool.call(task, base_url=base_url, api_key=api_key, say=spoken.line)
        return result


def agents_of(config: RunConfig) -> dict[Purpose, Agent]:
    """By purpose. Raises ConfigError saying what is wrong with a path."""
    found: dict[Purpose, Agent] = {}
    own, evaluator = config.rollout.agent, config.evaluator
    if runs_agents(config):
        found["train"] = _trained(config)
    if not evaluator.path:
        return found
    if evaluator.agent:
        found["eval"] = _at(config, evaluator.agent, EVAL)
    elif "train" in found and not (own.command and own.path):
        found["eval"] = found["train"]
    elif own.path:
        found["eval"] = _at(config, own.path, OWN)
    return found


def _trained(config: RunConfig) -> Agent:
    agent = config.rollout.agent
    if agent.mode == "online" and (agent.command or agent.framework):
        settings, words = ProgramSettings.of(config), split_command(agent.command) if agent.command else None
        if agent.framework is None:
            assert words is not None
            return ProgramAgent(settings, words)
        build = load_target(agent.path, OWN) if agent.path and not agent.command else None
        if agent.path and hasattr(build, "run"):
            return load_agent(agent.path)
        made: Agent = FRAMEWORKS[agent.framework](settings, words, build)
        return made
    assert agent.path is not None
    return _at(config, agent.path, OWN)


def _at(config: RunConfig, path: str, key: str) -> Agent:
    return PooledAgent(config, path, key) if config.rollout.agent.mode == "subproc" else load_agent(path, key)
