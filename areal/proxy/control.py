"""The control routes of a worker: start, reward, end, look at, exclude and export sessions.

    ControlRoutes(sessions, store, callers, keys, agent).add_to(app)

Two key classes: the admin key opens start_session, exclude_session and export_trajectories, a session key the rest (or the internal token, for the
session that its topic names); the wrong class is 403, no good key 401. Bodies are read field by field, so that NaN, "1.0" or true is no reward (T043) and an earlier reward stays. With
`rollout.agent.reward_key: admin` only the admin key rewards, naming the session. Keys are never logged. Used by app.py.
"""

from __future__ import annotations

import asyncio
import logging
import unicodedata
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, get_args

import orjson
from fastapi import FastAPI, Request, Response

from areal.base.errors import BadRequest, Conflict, Forbidden, InvalidKey, NotFound
from areal.base.types import ExportStyle, Purpose
from areal.config.rollout import AgentConfig
from areal.proxy import export, records
from areal.proxy.callers import Callers
from areal.proxy.dialects import fields
from areal.proxy.implicit import Guest
from areal.proxy.model_routes import decode_json
from areal.proxy.sessions import Sessions, StartRequest, set_reward
from areal.store.base import LARGEST_REWARD, Store
from areal.web.auth import SessionKey, SessionKeys, opens, presented_keys
from areal.web.body import read_body

_log = logging.getLogger("areal.proxy")

LONGEST_NAME = 512  # characters of a task id, request id, tag name or tag value
MOST_TAGS = 32
# What each route reads; a misspelt `purpose` or `interaction_id` would otherwise change what is trained, and nobody heard of it.
_KNOWN: Mapping[str, frozenset[str]] = {
    "start_session": frozenset({"task_id", "api_key", "purpose", "tags", "request_id", "model_key"}),
    "set_reward": frozenset({"reward", "interaction_id", "session_id"}),
    "exclude_session": frozenset({"session_id", "reason", "delete", "tags"}),
    "export_trajectories": frozenset({"session_id", "style", "discount"}),
}


class ControlRoutes:
    """The `/rl/...` routes as FastAPI handlers."""

    def __init__(
        self, sessions: Sessions, store: Store, callers: Callers, keys: SessionKeys, agent: AgentConfig
    ) -> None:
        self._sessions = sessions
        self._store = store
        self._callers = callers
        self._keys = keys
        self._agent = agent
        self._ignored = {route: fields.Ignored(route) for route in _KNOWN}

    def add_to(self, app: FastAPI) -> None:
        """Every control route of contract section 3."""
        app.add_api_route("/rl/start_session", self._start, methods=["POST"])
        app.add_api_route("/rl/set_reward", self._reward, methods=["POST"])
        app.add_api_route("/rl/end_session", self._end, methods=["POST"])
        app.add_api_route("/rl/session", self._look, methods=["GET", "POST"])
        app.add_api_route("/rl/exclude_session", self._exclude, methods=["POST"])
        for path in ("/rl/export_trajectories", "/export_trajectories"):
            app.add_api_route(path, self._export, methods=["POST"])

    async def _start(self, request: Request) -> Response:
        self._require_admin(request, "start_session")
        body = self._known("start_session", await _body(request))
        wants_model_key = fields.flag(body, "model_key")
        session, key = await self._sessions.start(start_request(body))
        _log.info("session %s started for task %s", session.id, fields.shown(session.task_id))
        model_key = {"model_key": self._keys.model_key(self._keys.check(key))} if wants_model_key else {}
        return _json({"session_id": session.id, "api_key": key, **model_key})

    async def _reward(self, request: Request) -> Response:
        body = self._known("set_reward", await _body(request))
        reward, interaction = reward_of(body), body.get("interaction_id")
        if interaction is not None:
            interaction = fields.as_text(interaction, "interaction_id")
        if opens(_keys(request), self._agent.admin_api_key):
            session_id = fields.text(body, "session_id") or await self._session_of(interaction)
            named = await set_reward(self._store.sessions, session_id, reward, interaction)
        else:
            self._callers.who(request.scope["headers"])  # who has no key hears that first
            if self._agent.reward_key != "session" or self._agent.reward_source != "client":
                raise Forbidden(
                    "an agent's key may not reward itself in this run: rewards come from its reward source, or from the admin "
                    "key (rollout.agent.reward_key)"
                )
            key = await self._session_key(request, body)
            await self._check_own(key, fields.text(body, "session_id"))
            named = await self._sessions.reward(key, reward, interaction)
        trained = export.clipped(reward, self._agent.reward_clip)
        told = {} if trained == reward else {"clipped_to": trained}
        return _json({"message": "success", "interaction_id": named, "reward": reward, **told})

    async def _end(self, request: Request) -> Response:
        session = await self._sessions.end(await self._session_key(request))
        return _json({"message": "success", "session_id": session.id, "interaction_count": session.interaction_count})

    async def _look(self, request: Request) -> Response:
        session, in_flight = await self._sessions.look(await self._session_key(request))
        interactions = await self._store.sessions.interactions(session.id)
        summary = await self._store.reading.session(session.id)
        if summary is None:
            raise NotFound(f"session {fields.shown(session.id)} was deleted just now; start another one")
        clip = self._agent.reward_clip
        return _json(await asyncio.to_thread(records.looked_at, summary, interactions, in_flight, clip))

    async def _exclude(self, request: Request) -> Response:
        self._require_admin(request, "exclude_session")
        body = self._known("exclude_session", await _body(request))
        because, delete, tags = body.get("reason"), fields.flag(body, "delete"), _tags(body)
        reason = "" if because is None else _name(because, "reason")
        if not tags:
            session_id = fields.as_text(body.get("session_id"), "session_id")
            await self._sessions.exclude(session_id, reason, delete=delete)
            return _json({"message": "success", "session_id": session_id, "fate": await self._fate(session_id)})
        if body.get("session_id") is not None:
            raise BadRequest("name either the session_id, or the tags of the sessions that are meant", param="tags")
        fates = {}
        for session_id in await self._store.reading.tagged(tags):
            with suppress(Conflict):  # a step has it: its fate says so
                await self._sessions.exclude(session_id, reason, delete=delete)
            fates[session_id] = await self._fate(session_id)
        return _json({"message": "success", "sessions": fates})

    async def _fate(self, session_id: str) -> str:
        summary = await self._store.reading.session(session_id)
        assert summary is not None
        _log.info("session %s, to be excluded by request, is now: %s", session_id, summary.fate)
        return summary.fate

    async def _export(self, request: Request) -> Response:
        self._require_admin(request, "export_trajectories")
        body = self._known("export_trajectories", await _body(request))
        session_id = fields.as_text(body.get("session_id"), "session_id")
        style: Any = fields.text(body, "style", self._agent.export_style)
        if style not in get_args(ExportStyle):
            raise BadRequest(
                f"style must be one of {', '.join(get_args(ExportStyle))}, not {fields.shown(style)}", param="style"
            )
        discount = fields.number(body, "discount", low=0, high=1)
        summary = await self._store.reading.session(session_id)
        if summary is None:
            raise NotFound(f"there is no session {fields.shown(session_id)}; its id stands in start_session's answer")
        if summary.session.deleted_at is not None:
            raise NotFound(f"the content of session {fields.shown(session_id)} was deleted; only its sums are kept")
        interactions = await self._store.sessions.interactions(session_id)
        discount = self._agent.turn_discount if discount is None else discount
        clip = self._agent.reward_clip
        return _json(await asyncio.to_thread(records.exported, summary, interactions, style, discount, clip))

    async def _session_key(self, request: Request, body: fields.JsonObject | None = None) -> SessionKey:
        """Of the session that is meant; under the internal token the body may name it by one of its answers. body: where it
        has been read, since it comes once."""
        who, named = self._callers.who(request.scope["headers"]), None
        if isinstance(who, Guest):
            named = (await _body(request) if body is None else body).get("interaction_id")
        return await self._callers.key(who, None if named is None else fields.as_text(named, "interaction_id"))

    async def _session_of(self, interaction_id: str | None) -> str:
        """The id of the session that recorded an answer, for the admin key, which belongs to none."""
        if interaction_id is None:
            raise BadRequest(
                "with the admin key, name the session (session_id) or one of its answers (interaction_id)",
                param="session_id",
            )
        session = await self._store.sessions.of_answer(interaction_id)
        if session is None:
            raise NotFound(
                f"no session has the finished answer {fields.shown(interaction_id)}; use the id of an answer"
            )
        return session.id

    async def _check_own(self, key: SessionKey, session_id: str) -> None:
        """Raises Forbidden where a session key names another session than its own."""
        if session_id and session_id != (await self._sessions.look(key))[0].id:
            raise Forbidden(
                f"a session key rewards its own session, not {fields.shown(session_id)}; leave session_id out, or use the admin key"
            )

    def _known(self, route: str, body: fields.JsonObject) -> fields.JsonObject:
        """The body itself; names in it that the route does not know are logged once."""
        self._ignored[route].note("field", body.keys() - _KNOWN[route])
        return body

    def _require_admin(self, request: Request, call: str) -> None:
        presented = _keys(request)
        if opens(presented, self._agent.admin_api_key):
            return
        try:
            self._keys.session_key(presented)
        except InvalidKey:
            raise InvalidKey(f"{call} takes the admin key, rollout.agent.admin_api_key") from None
        raise Forbidden(f"a session key may not call {call}; use the admin key, rollout.agent.admin_api_key")


def start_request(body: Mapping[str, Any]) -> StartRequest:
    """A checked start_session body. Ids are data, whatever they look like; only what no store can keep is refused."""
    purpose: Any = fields.text(body, "purpose", "train")
    if purpose not in get_args(Purpose):
        raise BadRequest(f"purpose must be train or eval, not {fields.shown(purpose)}", param="purpose")
    request_id, api_key = body.get("request_id"), body.get("api_key")
    return StartRequest(
        task_id=_name(body.get("task_id"), "task_id"),
        api_key=None if api_key is None else fields.as_text(api_key, "api_key").strip() or None,
        purpose=purpose,
        tags=_tags(body),
        request_id=None if request_id is None else _name(request_id, "request_id"),
    )


def reward_of(body: Mapping[str, Any]) -> float:
    """A finite number. Raises BadRequest for null, text, booleans, lists and what is too large to be one."""
    if body.get("reward") is None:
        raise BadRequest(
            "reward is missing: send a number; a verifier that failed has no reward to set", param="reward"
        )
    reward = fields.number(body, "reward", low=-LARGEST_REWARD, high=LARGEST_REWARD)
    assert reward is not None
    return reward


def _tags(body: Mapping[str, Any]) -> dict[str, str]:
    tags = fields.as_object(body.get("tags") or {}, "tags")
    if len(tags) > MOST_TAGS:
        raise BadRequest(f"at most {MOST_TAGS} tags, not {len(tags)}", param="tags")
    return {_name(name, "tags"): _name(value, f"tags.{name[:40]}") for name, value in tags.items()}


def _name(value: object, param: str) -> str:
    text = fields.as_text(value, param)
    if not text.strip() or len(text) > LONGEST_NAME:
        raise BadRequest(f"{param} must have 1 to {LONGEST_NAME} characters, not {len(text)}", param=param)
    if any(unicodedata.category(char) in ("Cc", "Cs") for char in text):
        raise BadRequest(f"{param} holds a control character; send plain text", param=param)
    return text


async def _body(request: Request) -> fields.JsonObject:
    raw = await read_body(request.receive)
    return fields.as_object(decode_json(raw) if raw.strip() else {}, "the body")


def _keys(request: Request) -> tuple[str, ...]:
    return presented_keys(request.scope["headers"])


def _json(body: Mapping[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
