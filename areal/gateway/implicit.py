"""The router of the internal token: requests of an agent that is configured once and never calls start_session.

    target = await TokenRouter().route(exchange, run)     # Target("w1", url, headers=((TOPIC_HEADER, sealed),))

Such a key names no session, so the request does: a header or field by which the client names its conversation, else the
first user message. The body is read only where no header says it. Rewards and ends may name an answer instead, and then the
store knows its session. The topic is rendezvous-hashed over the live workers,
and travels in a header sealed with the run's signing secret; one from outside never passes (splice.py). Every
other key goes to KeyRouter. Used by app.py; proxy/implicit.py opens and closes the sessions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from areal.base.errors import BadRequest
from areal.gateway.exchange import Exchange
from areal.gateway.routing import KeyRouter, Run, Target, session_key
from areal.web.auth import opens, presented_keys
from areal.web.topic import TOPIC_HEADER, Topic, unknown_answer

# In this order: anybody's own header, Claude Code's, codex's (measured; clients send these by themselves).
HINT_HEADERS = (b"x-session-id", b"x-claude-code-session-id", b"session-id")
_PROBES = ("models", "model")  # they belong to no session


class TokenRouter:
    """KeyRouter, and the internal token where a request presents no session key beside it."""

    def __init__(self) -> None:
        self._keys = KeyRouter()

    async def route(self, exchange: Exchange, run: Run) -> Target:
        """Raises what KeyRouter raises, WorkerGone, BadRequest for a reward that names no session."""
        if run.internal_token is None:
            return await self._keys.route(exchange, run)
        presented = presented_keys(exchange.headers)
        ours = exchange.route.access in ("session", "any_key") and opens(presented, run.internal_token)
        if not ours or session_key(presented, run) is not None:
            return await self._keys.route(exchange, run)
        if exchange.route.name in _PROBES:
            return (await run.directory.by_load())[0]
        topic = await topic_of(exchange)
        if topic.kind == "conversation" and exchange.route.upstream.startswith("/rl/"):
            topic = await _topic_of_answer(exchange, run)
        target = await run.directory.place_of(topic.text)
        return Target(target.worker, target.url, ((TOPIC_HEADER, run.keys.seal(topic.text)),))


async def _topic_of_answer(exchange: Exchange, run: Run) -> Topic:
    """Of the session that recorded the answer which the body names. Raises BadRequest, NotFound."""
    answer = (await _body_of(exchange)).get("interaction_id")
    if not isinstance(answer, str) or not answer:
        raise BadRequest(
            f"the internal token does not say which session {exchange.route.name} means; name it as the model calls "
            "do, in the header x-session-id, or by the id of one of its answers, in interaction_id"
        )
    session = await run.sessions.of_answer(answer)
    topic = None if session is None else Topic.of_task(session.task_id)
    if topic is None:
        raise unknown_answer(answer)
    return topic


async def topic_of(exchange: Exchange) -> Topic:
    """What the request is about. A body that cannot be read is the worker's to refuse."""
    for name in HINT_HEADERS:
        named = (exchange.header(name) or b"").decode("latin-1").strip()
        if named:
            return Topic.hint(named)
    body = await _body_of(exchange)
    named = hint_in(body)
    return Topic.hint(named) if named else Topic.opening(first_user_text(body))


async def _body_of(exchange: Exchange) -> Mapping[str, Any]:
    try:
        body = orjson.loads(await exchange.decoded_body() or b"{}")
    except orjson.JSONDecodeError:
        return {}
    return body if isinstance(body, dict) else {}


def hint_in(body: Mapping[str, Any]) -> str:
    """The session's name in a request body, empty if there is none: metadata.user_id (Claude Code writes JSON with a
    session_id into it; any other text is taken whole), or prompt_cache_key."""
    metadata = body.get("metadata")
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    if isinstance(user, str) and user.strip():
        try:
            parsed = orjson.loads(user)
        except orjson.JSONDecodeError:
            parsed = None
        inner = parsed.get("session_id") if isinstance(parsed, dict) else None
        return (inner if isinstance(inner, str) and inner.strip() else user).strip()
    cache = body.get("prompt_cache_key")
    return cache.strip() if isinstance(cache, str) else ""


def first_user_text(body: Mapping[str, Any]) -> str:
    """The text of the first user message, in any of the three protocols; empty if there is none."""
    messages = body.get("messages", body.get("input"))
    if isinstance(messages, str):
        return messages
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("role") == "user":
            return _text(message.get("content"))
    return ""


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    parts = [part.get("text") for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    return "\n".join(part for part in parts if isinstance(part, str))
