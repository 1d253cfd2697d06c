"""`POST /agents/run`: one run of an agent inside a worker, as a session like any other.

    AgentRuns(config, sessions, base_url=url, run_token=token).add_to(app)
    {"task_id", "task", "purpose", "request_id"} -> {"session_id", "reward", "error"}

The answer comes when the agent is done. Its session is ended before: `ended` with its reward, or `reward_failed` if the agent
raised, which is counted and never trained (settled 9). An agent that stands still until its session expires is cancelled. The caller
going away cancels the agent too; the session of a training task is left as it is then, for the run to take up
(TrainingStore.interrupt): its controller is gone, and no agent has failed. Opened by the run's token only. Used by worker.py; called by
dispatcher.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from areal.base.errors import BadRequest, StoreError
from areal.base.types import Ending, Purpose
from areal.config.run import RunConfig
from areal.proxy.sessions import Sessions, StartRequest
from areal.rollout.agents import Agent, load_agent, rewards_of
from areal.web.app import Application, add_route, send_json
from areal.web.auth import SessionKey, presented_keys, require
from areal.web.body import disconnected, read_body

LOOK_S = 15.0  # between two looks whether the session of an agent still runs
CANCEL_S = 10.0  # that a cancelled agent may take to tidy up

_log = logging.getLogger("areal.agents")


class RunRequest(msgspec.Struct, frozen=True):
    """task: the JSON object handed to the agent. purpose eval: evaluator.agent runs it, if one is set."""

    task_id: str
    task: dict[str, Any]
    purpose: Purpose = "train"
    request_id: str | None = None


class AgentRuns:
    """Runs the configured agents. Agents are loaded at start, so that a wrong path is an error before any session."""

    def __init__(self, config: RunConfig, sessions: Sessions, *, base_url: str, run_token: str) -> None:
        self._sessions = sessions
        self._base_url = f"{base_url}/v1"
        self._token = run_token
        own, evaluator = config.rollout.agent.path, config.evaluator
        wanted = {"train": config.rollout.agent.mode == "inline", "eval": bool(evaluator.path)}
        paths = {"train": own, "eval": evaluator.agent or own}
        self._agents: dict[str, Agent] = {
            purpose: load_agent(path) for purpose, path in paths.items() if path and wanted[purpose]
        }

    def add_to(self, app: Application) -> None:
        add_route(app, "/agents/run", self._handle)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        require(presented_keys(scope["headers"]), self._token, "the run's token")
        try:
            request = msgspec.json.decode(await read_body(receive), type=RunRequest)
        except msgspec.MsgspecError as error:
            raise BadRequest(f"not a run request: {error}") from None
        work = asyncio.create_task(self.run(request))
        gone = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await send_json(send, work.result())
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.wait({work, gone})

    async def run(self, request: RunRequest) -> dict[str, Any]:
        """Start a session, run the agent in it, reward it, end it."""
        agent = self._agents.get(request.purpose)
        if agent is None:
            raise BadRequest(
                f"no agent is configured for {request.purpose} tasks: set rollout.agent.path or evaluator.agent"
            )
        session, key = await self._sessions.start(
            StartRequest(task_id=request.task_id, purpose=request.purpose, request_id=request.request_id)
        )
        opened = SessionKey(key, session.worker)
        ending: Ending = "reward_failed"
        reward: float | None = None
        error = ""
        try:
            work = agent.run(dict(request.task), base_url=self._base_url, api_key=key)
            rewards = rewards_of(await self._while_its_session_runs(work, opened))
            for interaction_id, value in rewards.items():
                await self._sessions.reward(opened, value, interaction_id)
            reward, ending = sum(rewards.values()), "ended"
        except asyncio.CancelledError:
            if request.purpose == "eval":
                await self._sessions.end(opened, ending)
            raise
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            _log.warning("the agent failed on task %r: %s", request.task_id, error)
        await self._sessions.end(opened, ending)
        return {"session_id": session.id, "reward": reward, "error": error}

    async def _while_its_session_runs(self, work: Awaitable[object], key: SessionKey) -> object:
        """What the agent returns. One that stands still until its session has expired is cancelled: it holds a slot that nobody gets, and
        with enough of them nothing would ever be trained again."""
        agent = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({agent}, timeout=LOOK_S))[0]:
                with suppress(StoreError):  # it is busy or away; the next look tells
                    row, _ = await self._sessions.look(key)
                    if row.ending == "expired":
                        raise TimeoutError(
                            f"session {row.id} expired before the agent came to its end (rollout.agent.session_timeout_seconds)"
                        )
            return agent.result()
        finally:
            agent.cancel()
            await asyncio.wait({agent}, timeout=CANCEL_S)
