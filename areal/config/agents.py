"""Processes of agents that the service starts itself (`rollout.agent.process`)."""

from __future__ import annotations

from pydantic import Field

from areal.config.section import Section


class ProcessConfig(Section):
    """Of `mode: subproc`, and of `command` or `framework` where there are tasks (docs/agents.md). Each process runs one session at a time.
    timeout_seconds also holds for agents that run in the worker's own loop."""

    max_running: int = Field(8, ge=1)
    """Most at once in each rollout worker; further tries wait, before their sessions begin. Agents mostly wait for the model, so several
    for each core; each takes the memory of one agent."""
    timeout_seconds: float = Field(600.0, gt=0)
    """Of one try, whatever runs it. Then its process and all that it started are ended, or the agent in the worker's loop (`mode: inline`,
    langchain) is cancelled, and the session fails (reward_failed). A thread that such an agent waits for cannot be ended and runs on."""
    memory_mb: int | None = Field(None, ge=64)
    """MiB that each process of an agent may take (RLIMIT_DATA): a MemoryError in Python, and the session fails. null = no limit. Worth setting
    for agents in Python, 2048 for example; programs on Node.js reserve several GiB more than they use."""
    environment: list[str] = Field([])
    """Names of variables of the trainer's environment that agents see, beside PATH, HOME, LANG and the like. Keys of the run are not
    passed on unless they are named here."""
