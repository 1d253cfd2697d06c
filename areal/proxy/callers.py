"""Who calls a worker: a session key, which is one session, or the internal token with the topic that its gateway sealed.

    who = callers.who(scope["headers"])                       # SessionKey | Guest, or InvalidKey (401)
    async with callers.calling(who, call, task) as live: ...
    key = await callers.key(who, interaction_id)              # for the routes of a session: reward, end, look

A session key goes first where both are presented. The topic's header counts only with its seal, and only beside the internal
token: what a client writes into it changes nothing. Used by model_routes.py, control.py and app.py.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any

from areal.base.errors import Forbidden, InvalidKey
from areal.base.types import ModelCall
from areal.config.rollout import AgentConfig
from areal.proxy.conversation import Conversation
from areal.proxy.implicit import Guest, ImplicitSessions
from areal.proxy.live import LiveSession
from areal.proxy.sessions import Sessions
from areal.store.base import Store
from areal.web.auth import RawHeaders, SessionKey, SessionKeys, opens, presented_keys
from areal.web.topic import TOPIC_HEADER, Topic

_LONGEST_TAG = 200  # characters of a User-Agent that are kept


class Callers:
    """Reads who a request comes from, and leads to that caller's session."""

    def __init__(self, store: Store, sessions: Sessions, keys: SessionKeys, *, worker: str, agent: AgentConfig) -> None:
        self._sessions, self._keys, self._agent = sessions, keys, agent
        self._implicit = ImplicitSessions(store, sessions, keys, worker=worker, agent=agent)

    def who(self, headers: RawHeaders, *, model_only: bool = False) -> SessionKey | Guest:
        """model_only: whether a model-only key will do. Raises InvalidKey, Forbidden."""
        pairs = list(headers)
        presented = presented_keys(pairs)
        try:
            return self._keys.session_key(presented, model_only=model_only)
        except (InvalidKey, Forbidden):
            if not opens(presented, self._agent.internal_token):
                raise
        sent = dict(pairs)
        sealed = sent.get(TOPIC_HEADER.encode())
        if sealed is None:
            raise InvalidKey("the internal token opens sessions through the gateway only; call the gateway")
        topic = Topic.parse(self._keys.unseal(sealed.decode("latin-1")))
        return Guest(topic, self._tags(sent.get(b"user-agent", b"").decode("latin-1")))

    def probes(self, headers: RawHeaders) -> None:
        """Whether this caller may see the models: any key of this run. Raises InvalidKey."""
        presented = presented_keys(headers)
        if not opens(presented, self._agent.admin_api_key) and not opens(presented, self._agent.internal_token):
            self._keys.session_key(presented, model_only=True)

    def calling(
        self, who: SessionKey | Guest, call: ModelCall, task: asyncio.Task[Any]
    ) -> AbstractAsyncContextManager[LiveSession]:
        """The session that this task's model call belongs to, from here to the end of the block."""
        if isinstance(who, Guest):
            return self._implicit.calling(who, call, task)
        return self._sessions.calling(who, task)

    async def conversation(self, who: SessionKey | Guest, call: ModelCall) -> Conversation:
        """What the call would go on from; an empty one where it would open a session. Opens none."""
        if isinstance(who, SessionKey):
            return (await self._sessions.of(who)).conversation
        live = await self._implicit.find(who.topic, call)
        return Conversation() if live is None else live.conversation

    async def key(self, who: SessionKey | Guest, interaction_id: str | None = None) -> SessionKey:
        """Of the session that a control route means; a session key says it alone. Raises InvalidKey, NotFound."""
        return await self._implicit.key(who.topic, interaction_id) if isinstance(who, Guest) else who

    def _tags(self, user_agent: str) -> dict[str, str]:
        """agent: the configured framework, else the first word of the User-Agent."""
        said = "".join(char for char in user_agent if char.isprintable()).strip()[:_LONGEST_TAG]
        agent = self._agent.framework or (said.split() or [""])[0].partition("/")[0]
        return {name: text for name, text in (("agent", agent), ("user_agent", said)) if text}
