"""docs/openapi.json, written from the routes themselves: `python -m areal.gateway.openapi > docs/openapi.json`.

An OpenAPI 3.1 description of everything that the gateway answers, for client generators and fuzzers. It is a file and not a route: a
gateway tells strangers nothing about itself. Each route of paths.py stands there once, though it answers under every
prefix too. Bodies of the model routes: proxy/dialects/schemas.py. A test holds the file to what this prints.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any, get_args

import areal
from areal.base.types import ExportStyle, Purpose
from areal.gateway.paths import PREFIXES, ROUTES, Route
from areal.proxy.control import LONGEST_NAME, MOST_TAGS
from areal.proxy.dialects import schemas
from areal.proxy.dialects.schemas import OBJECT, TEXT, Schema, nullable, record
from areal.store.base import LARGEST_REWARD

_HEAD = {
    "openapi": "3.2.0",  # 3.1 has no word for the events of a stream
    "info": {
        "title": "areal gateway",
        "version": areal.__version__,
        "description": "One URL for all agents of a training run. In words: docs/http.md. Every route also answers under "
        + ", ".join(f"`{prefix}`" for prefix in PREFIXES if prefix)
        + ". Generated: `python -m areal.gateway.openapi > docs/openapi.json`.",
    },
    "servers": [{"url": "http://127.0.0.1:8090"}],
}
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A session key, or the admin key where a route takes it."},
    "api_key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same keys, as Anthropic's clients send them."},
}  # fmt: skip
_EVENT = record({"event": TEXT, "data": TEXT}, ["data"])
_NAME = {**TEXT, "minLength": 1, "maxLength": LONGEST_NAME}
_TAGS = nullable({"type": "object", "maxProperties": MOST_TAGS, "additionalProperties": _NAME})
_START = record(
    {
        "task_id": _NAME,
        "api_key": nullable(TEXT),
        "purpose": {"enum": [*get_args(Purpose), None]},
        "tags": _TAGS,
        "request_id": nullable(_NAME),
        "model_key": nullable({"type": "boolean"}),
    },
    ["task_id"],
)
_REWARD = record(
    {
        "reward": {"type": "number", "minimum": -LARGEST_REWARD, "maximum": LARGEST_REWARD},
        "interaction_id": nullable(TEXT),
        "session_id": nullable(TEXT),
    },
    ["reward"],
)
_WHICH = record({"interaction_id": nullable(TEXT)})  # under the internal token: an answer of the session that is meant
# Either the session, or the tags of all that are meant.
_EXCLUDE = record(
    {"session_id": nullable(TEXT), "tags": _TAGS, "reason": nullable(_NAME), "delete": nullable({"type": "boolean"})}
)
_EXCLUDED = record({"session_id": TEXT, "fate": TEXT, "sessions": {"type": "object", "additionalProperties": TEXT}})
_EXPORT = record(
    {
        "session_id": TEXT,
        "style": {"enum": [*get_args(ExportStyle), None]},
        "discount": nullable({"type": "number", "minimum": 0, "maximum": 1}),
    },
    ["session_id"],
)
_MODEL = record({"id": TEXT, "object": {"const": "model"}}, ["id", "object"])
# By the name of a route: what it takes and what it gives, JSON both.
_BODIES: dict[str, tuple[Schema | None, Schema]] = {
    "chat": (schemas.CHAT, schemas.CHAT_ANSWER),
    "responses": (schemas.RESPONSES, schemas.RESPONSES_ANSWER),
    "messages": (schemas.MESSAGES, schemas.MESSAGES_ANSWER),
    "input_tokens": (schemas.RESPONSES, schemas.COUNT_ANSWER),
    "count_tokens": (schemas.MESSAGES, schemas.COUNT_ANSWER),
    "models": (None, record({"object": {"const": "list"}, "data": schemas.array(_MODEL)}, ["object", "data"])),
    "model": (None, _MODEL),
    "start_session": (_START, record({"session_id": TEXT, "api_key": TEXT, "model_key": TEXT}, ["session_id", "api_key"])),
    "set_reward": (_REWARD, record({"interaction_id": TEXT, "reward": {"type": "number"}}, ["interaction_id", "reward"])),
    "end_session": (_WHICH, record({"session_id": TEXT, "interaction_count": {"type": "integer"}}, ["interaction_count"])),
    "session": (_WHICH, record({"session_id": TEXT, "tokens": OBJECT}, ["session_id", "tokens"])),
    "exclude": (_EXCLUDE, _EXCLUDED),
    "export": (_EXPORT, record({"interactions": schemas.array(OBJECT), "trajectories": schemas.array(OBJECT)}, ["trajectories"])),
    "health": (None, record({"status": {"enum": ["ok", "degraded"]}, "workers": {"type": "integer"}}, ["status", "workers"])),
    "hello": (None, record({"service": TEXT}, ["service"])),
    "root": (None, record({"service": TEXT}, ["service"])),
}  # fmt: skip
_STREAMS = ("chat", "responses", "messages")
_OPENAI_ERROR = record(
    {
        "error": record(
            {"message": TEXT, "type": TEXT, "param": nullable(TEXT), "code": nullable(TEXT)},
            ["message", "type", "param", "code"],
        )
    },
    ["error"],
)
_ANTHROPIC_ERROR = record(
    {
        "type": {"const": "error"},
        "error": record({"type": TEXT, "message": TEXT}, ["type", "message"]),
        "request_id": TEXT,
    },
    ["type", "error"],
)
_STATUSES = {
    "400": "The request is at fault; the message says where.",
    "401": "No key, or one that is wrong, ended or expired.",
    "403": "This key may not do that, or not ask this model, or the Host or Origin is not this machine's.",
    "404": "No such answer, session or model.",
    "405": "Another method.",
    "408": "The request stopped coming.",
    "409": "The key is being refreshed.",
    "413": "The body is too large.",
    "429": "No free slot, or a limit of the upstream channel; Retry-After says when to ask again.",
    "431": "The URL and headers are too large.",
    "502": "A worker, a backend or the upstream channel is not reachable, or said something that is no answer.",
    "503": "Draining, without a run, unable to write, or the upstream model is taken for dead; has Retry-After.",
    "504": "A worker, a backend or the upstream channel took too long.",
}


def document() -> dict[str, Any]:
    """The whole description."""
    paths: dict[str, dict[str, Any]] = {}
    for path, route in _routes():
        methods = [method.lower() for method in route.methods if method != "HEAD"]
        paths[path] = {method: _operation(path, method, route) for method in methods}
    errors = {"openai": _OPENAI_ERROR, "anthropic": _ANTHROPIC_ERROR}
    return {**_HEAD, "paths": paths, "components": {"securitySchemes": _KEYS, "schemas": errors}}


def _routes() -> Iterator[tuple[str, Route]]:
    for path, route in ROUTES.items():
        in_public = f"/v1{path}" if route.upstream.startswith("/v1") else path or "/"
        yield in_public, route
        if route.name == "models":
            yield f"{in_public}/{{name}}", Route("model", route.methods, route.access)


def _operation(path: str, method: str, route: Route) -> dict[str, Any]:
    taken, given = _BODIES.get(route.name, (None, None))
    content: dict[str, Any] = {"application/json": {"schema": given}}
    if route.name == "metrics":
        content = {"text/plain": {"schema": TEXT}}
    elif route.name in _STREAMS:
        content["text/event-stream"] = {"itemSchema": _EVENT}
    error = {"$ref": f"#/components/schemas/{'anthropic' if route.dialect == 'anthropic' else 'openai'}"}
    said = {"content": {"application/json": {"schema": error}}}
    answers = {status: {"description": text, **said} for status, text in _STATUSES.items()}
    operation: dict[str, Any] = {
        "operationId": f"{method}_{path.strip('/').replace('/', '_') or 'root'}".replace("{", "").replace("}", ""),
        "responses": {"200": {"description": "Done.", "content": content}, **answers},
    }
    if route.access != "none":
        operation["security"] = [{name: []} for name in _KEYS]
    if taken is not None and method == "post":
        needed = bool(taken.get("required"))
        operation["requestBody"] = {"required": needed, "content": {"application/json": {"schema": taken}}}
    if "{name}" in path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {**TEXT, "minLength": 1}}]
    return operation


if __name__ == "__main__":
    sys.stdout.write(json.dumps(document(), indent=1, ensure_ascii=False) + "\n")
