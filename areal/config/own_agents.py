"""Agents that the service starts itself: whether it does, and what keeps it from it.

    runs_agents(config)         # whether training tasks are given out here, or agents come over HTTP by themselves
    agent_problems(config)      # sentences, part of startable.why_not

inline and subproc run `rollout.agent.path`. online runs, where there are tasks, `rollout.agent.command`, else the framework's driver,
else `rollout.agent.path`; without tasks it waits for agents that come over HTTP.
"""

from __future__ import annotations

import shutil

from areal.base.errors import ConfigError
from areal.config.agents import ProcessConfig
from areal.config.commands import split_command
from areal.config.frameworks import NEEDS, missing
from areal.config.run import RunConfig
from areal.config.task_source import source_problem


def runs_agents(config: RunConfig) -> bool:
    """Whether this run gives out tasks."""
    agent = config.rollout.agent
    return agent.mode != "online" or bool(
        config.train_dataset.path and (agent.command or agent.framework or agent.path)
    )


def agent_problems(config: RunConfig) -> list[str]:
    """What keeps these agents and tasks from working together, one line each."""
    return [
        *_who_runs_what(config),
        *_evaluation(config),
        *_what_must_be_there(config),
        *_sessions(config),
    ]


def _who_runs_what(config: RunConfig) -> list[str]:
    agent, tasks, found = config.rollout.agent, config.train_dataset.path, []
    if agent.mode != "online":
        if not (agent.path and tasks):
            found.append(
                f"rollout.agent.mode is {agent.mode} but there is no agent or no tasks: set rollout.agent.path (module:attribute) and "
                "train_dataset.path (JSONL), or rollout.agent.mode=online to let agents come over HTTP"
            )
        for key in ("command", "framework"):
            if value := getattr(agent, key):
                found.append(
                    f"rollout.agent.{key}={value}: rollout.agent.mode={agent.mode} runs rollout.agent.path; set rollout.agent.mode=online, or "
                    "take it out"
                )
        return found
    if tasks and not runs_agents(config):
        found.append(
            f"train_dataset.path={tasks}: agents that come over HTTP bring their own tasks, so nobody reads it; take it out, or say which agent "
            "tries them: rollout.agent.mode=inline or subproc with rollout.agent.path, rollout.agent.command, or rollout.agent.framework"
        )
    if agent.command and not tasks:
        found.append(
            "rollout.agent.command has no tasks: set train_dataset.path (or `tasks` in the agent file), or take it out and start the agent "
            "yourself"
        )
    if agent.command and agent.path and not (config.evaluator.path and not config.evaluator.agent):
        found.append(
            f"rollout.agent.command and rollout.agent.path={agent.path} are two agents; take one out (evaluator.agent is for held-out tasks)"
        )
    if agent.path and tasks and not agent.command and agent.framework and NEEDS[agent.framework].program:
        found.append(
            f"rollout.agent.path={agent.path}: rollout.agent.framework={agent.framework} is a program of its own; take one of them out"
        )
    return found


def _evaluation(config: RunConfig) -> list[str]:
    agent, evaluator, found = config.rollout.agent, config.evaluator, []
    if evaluator.path and not (evaluator.agent or agent.path or runs_agents(config)):
        found.append("evaluator.path needs an agent to try its tasks: set evaluator.agent (module:attribute)")
    if evaluator.agent and not evaluator.path:
        found.append(
            f"evaluator.agent={evaluator.agent}: there are no tasks for it; set evaluator.path, or take it out"
        )
    return found


def _what_must_be_there(config: RunConfig) -> list[str]:
    agent, found = config.rollout.agent, []
    for key, path in (("train_dataset.path", config.train_dataset.path), ("evaluator.path", config.evaluator.path)):
        if path and (problem := source_problem(key, path)):
            found.append(problem)
    for key, target in (
        ("rollout.agent.path", agent.path),
        ("evaluator.agent", config.evaluator.agent),
        ("rollout.reward.path", config.rollout.reward.path),
    ):
        if target and not all(target.partition(":")):
            found.append(f"{key}={target}: write it as module:attribute, as in examples.tiny_sums.agent:TinySums")
    if agent.mode != "online" or not runs_agents(config):
        return found
    if agent.command:
        found += _command(agent.command)
    elif agent.framework and (problem := missing(agent.framework)):
        found.append(problem)
    return found


def _command(command: str | list[str]) -> list[str]:
    try:
        program = split_command(command)[0]
    except ConfigError as error:
        return [str(error)]
    if "{" in program or shutil.which(program):
        return []
    return [f"rollout.agent.command: there is no program {program} on PATH; install it, or write where it is"]


def _sessions(config: RunConfig) -> list[str]:
    agent, found = config.rollout.agent, []
    if agent.internal_token and config.gconfig.n_samples > 1 and not runs_agents(config):
        found.append(
            f"gconfig.n_samples={config.gconfig.n_samples}: a session that opens by itself, under rollout.agent.internal_token, is "
            "a task of its own, so its group would wait for other tries until it is dropped; set gconfig.n_samples=1 (sessions "
            "are then compared over the batch), or take the token out and start the tries of a task with start_session"
        )
    for name, section in (("saver", config.saver), ("recover", config.recover)):
        if section.freq_epochs and not config.train_dataset.path:
            found.append(
                f"{name}.freq_epochs={section.freq_epochs}: without train_dataset.path there are no epochs; set {name}.freq_steps or "
                f"{name}.freq_secs"
            )
    return found + _processes(config)


def _processes(config: RunConfig) -> list[str]:
    """Keys of rollout.agent.process that nothing reads: of agents in the worker's own loop only the time-out is."""
    agent, default = config.rollout.agent, ProcessConfig()
    given = [key for key in ProcessConfig.model_fields if getattr(agent.process, key) != getattr(default, key)]
    online = agent.mode == "online" and runs_agents(config)
    framework = agent.framework if online else None
    if agent.mode == "subproc" or (online and agent.command) or (framework and NEEDS[framework].program):
        return []
    here = runs_agents(config) or config.evaluator.path
    vain = [key for key in given if not (here and key == "timeout_seconds")]
    return [
        f"rollout.agent.process.{key}: no agent runs in a process of its own; set rollout.agent.mode=subproc, or rollout.agent.command with "
        "tasks, or take it out"
        for key in vain
    ]
