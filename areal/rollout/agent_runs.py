"""`POST /agents/run`: one run of an agent inside a worker, as a session like any other.

    async with AgentRuns(config, sessions, base_url=url, run_token=token) as runs: runs.add_to(app)
    {"task_id", "task", "purpose", "request_id"} -> {"session_id", "reward", "error"}

The answer comes when the agent is done. Its session is ended before: `ended` with its reward, or `reward_failed` if the agent
raised, which is counted and never trained (settled 9). An agent in this loop that takes too long, or any that stands still until its
session expires, is cancelled. The caller going away cancels the agent too; the session of a training task is left as it is then, for
the run to take up (TrainingStore.interrupt): its controller is gone, and no agent has failed. While the store cannot write (a full disk),
sessions are started, rewarded and ended as soon as it can again: that is no failure of the agent's either. Opened by the run's token
only. Used by worker.py; called by dispatcher.py.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any, Self, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from areal.base.errors import BadRequest, CallFailed, StoreError, StoreUnready
from areal.base.types import Ending, Purpose
from areal.config.run import RunConfig
from areal.proxy.sessions import Sessions, StartRequest
from areal.rollout.agent_choice import PooledAgent, agents_of
from areal.rollout.agent_output import speaking
from areal.rollout.agents import Agent, rewards_of
from areal.rollout.programs import ProgramAgent
from areal.store.base import Reading
from areal.web.app import Application, add_route, send_json
from areal.web.auth import SessionKey, presented_keys, require
from areal.web.body import disconnected, read_body

LOOK_S = 15.0  # between two looks whether the session of an agent still runs
CANCEL_S = 10.0  # that a cancelled agent may take to tidy up
AGAIN_S = 1.0  # between two tries to write to a store that cannot be written now
SAY_S = 30.0  # between two lines of the log about it

T = TypeVar("T")

_log = logging.getLogger("areal.agents")


class RunRequest(msgspec.Struct, frozen=True):
    """task: the JSON object handed to the agent. purpose eval: evaluator.agent runs it, if one is set."""

    task_id: str
    task: dict[str, Any]
    purpose: Purpose = "train"
    request_id: str | None = None


class AgentRuns:
    """Runs the configured agents (agent_choice.py). `async with` starts the processes that some of them live in. reading: where the rewards
    of an evaluation stand that an agent has set itself."""

    def __init__(
        self,
        config: RunConfig,
        sessions: Sessions,
        *,
        reading: Reading | None = None,
        base_url: str,
        run_token: str,
    ) -> None:
        agent = config.rollout.agent
        self._sessions = sessions
        self._reading = reading
        self._base_url = f"{base_url}/v1"
        self._token = run_token
        self._own_rewards = agent.reward_source == "client"
        self._model_keys = not self._own_rewards or agent.reward_key == "admin"
        self._timeout_s = agent.process.timeout_seconds
        self._slots = asyncio.Semaphore(agent.process.max_running)
        self._agents = agents_of(config)
        self._warned = False
        self._said_at = -SAY_S
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for agent in set(self._agents.values()):
            if isinstance(agent, PooledAgent):
                await self._stack.enter_async_context(agent)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

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
        """Start a session, run the agent in it, reward it, end it. An agent in processes of its own first waits for one, so that its
        session does not age meanwhile."""
        agent = self._agents.get(request.purpose)
        if agent is None:
            raise BadRequest(
                f"no agent is configured for {request.purpose} tasks: set rollout.agent.path or evaluator.agent"
            )
        if not isinstance(agent, ProgramAgent | PooledAgent):
            return await self._run(agent, request)
        async with self._slots:
            return await self._run(agent, request)

    async def _run(self, agent: Agent, request: RunRequest) -> dict[str, Any]:
        start = StartRequest(
            task_id=request.task_id,
            purpose=request.purpose,
            request_id=request.request_id,
            max_calls=agent.max_calls if isinstance(agent, ProgramAgent) else None,
        )
        session, key = await self._once_it_can(lambda: self._sessions.start(start))
        opened = SessionKey(key, session.worker)
        ending: Ending = "reward_failed"
        reward: float | None = None
        error = ""
        speaking.set(session.id)
        try:
            # A program may do what the policy says, which could read a key that also rewards.
            own = self._sessions.model_key(opened) if self._model_keys and isinstance(agent, ProgramAgent) else key
            work = agent.run(dict(request.task), base_url=self._base_url, api_key=own)
            # Agents in processes of their own count from when they have one, and end those.
            limit_s = math.inf if isinstance(agent, ProgramAgent | PooledAgent) else self._timeout_s
            rewards = self._wanted(rewards_of(await self._in_time(work, opened, limit_s)))
            for interaction_id, value in rewards.items():
                await self._once_it_can(partial(self._sessions.reward, opened, value, interaction_id))
            if not rewards:
                await self._refuse_silence(opened)
            reward, ending = sum(rewards.values()) if rewards else None, "ended"
        except asyncio.CancelledError:
            if request.purpose == "eval":
                await self._sessions.end(opened, ending)
            raise
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            _log.warning("the agent failed on task %r: %s", request.task_id, error)
        await self._once_it_can(lambda: self._sessions.end(opened, ending))
        if (
            reward is None
            and not error
            and self._reading is not None
            and (row := await self._reading.session(session.id))
        ):
            reward = row.reward  # that it has set itself
        return {"session_id": session.id, "reward": reward, "error": error}

    async def _once_it_can(self, write: Callable[[], Awaitable[T]]) -> T:
        """Its result, tried again for as long as the store cannot write."""
        while True:
            try:
                return await write()
            except StoreUnready as error:
                if time.monotonic() - self._said_at >= SAY_S:
                    self._said_at = time.monotonic()
                    _log.warning("agents wait for the store: %s", error)
                await asyncio.sleep(AGAIN_S)

    def _wanted(self, rewards: dict[str | None, float]) -> dict[str | None, float]:
        """None where somebody else rewards."""
        if self._own_rewards or not rewards:
            return rewards
        if not self._warned:
            self._warned = True
            _log.warning(
                "what agents return as their reward is left aside: rollout.agent.reward_source says who rewards"
            )
        return {}

    async def _refuse_silence(self, key: SessionKey) -> None:
        row, _ = await self._sessions.look(key)
        if row.interaction_count == 0:
            raise CallFailed(
                "raised",
                "the agent came to its end without one answer of the model: does it use the base URL and the key that it was given? What it "
                "printed stands in agents-<worker>.log",
            )

    async def _in_time(self, work: Awaitable[object], key: SessionKey, limit_s: float) -> object:
        """What the agent returns. One that takes longer than limit_s, or stands still until its session has expired, is cancelled: it holds
        a slot that nobody gets, and with enough of them nothing would ever be trained again."""
        agent = asyncio.ensure_future(work)
        deadline = time.monotonic() + limit_s
        try:
            while not (await asyncio.wait({agent}, timeout=max(0.0, min(LOOK_S, deadline - time.monotonic()))))[0]:
                if time.monotonic() >= deadline:
                    raise CallFailed(
                        "timed_out", f"the agent took longer than rollout.agent.process.timeout_seconds={limit_s:g}"
                    )
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
