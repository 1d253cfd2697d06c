"""Public paths: which route a request means, in whose protocol its errors are said, and where it goes.

    route = find_route("/gateway/v1/v1/messages")   # Route("messages", "/v1/messages", dialect="anthropic", ...)

Clients build URLs in many ways: with and without /v1, under S2's /gateway/v1, with a second /v1 that the Anthropic SDK
appends. All spellings are one route here and one canonical path behind the gateway. Query strings are left alone.
Used by app.py; routing.py reads `Route.access`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote

Dialect = Literal["openai", "responses", "anthropic"]
Access = Literal["none", "session", "admin", "start", "any_key"]  # whose key opens it; see routing.py


@dataclass(frozen=True, slots=True)
class Route:
    """One public route. upstream: the path on the worker, empty where the gateway answers itself."""

    name: str
    methods: tuple[str, ...]
    access: Access
    dialect: Dialect = "openai"
    upstream: str = ""


_POST = ("POST",)
_READ = ("GET", "HEAD")

ROUTES = {
    "/chat/completions": Route("chat", _POST, "session", "openai", "/v1/chat/completions"),
    "/responses": Route("responses", _POST, "session", "responses", "/v1/responses"),
    "/responses/input_tokens": Route("input_tokens", _POST, "session", "responses", "/v1/responses/input_tokens"),
    "/messages": Route("messages", _POST, "session", "anthropic", "/v1/messages"),
    "/messages/count_tokens": Route("count_tokens", _POST, "session", "anthropic", "/v1/messages/count_tokens"),
    "/models": Route("models", _READ, "any_key", "openai", "/v1/models"),
    "/api/hello": Route("hello", _READ, "none"),
    "": Route("root", _READ, "none"),
    "/rl/start_session": Route("start_session", _POST, "start", "openai", "/rl/start_session"),
    "/rl/set_reward": Route("set_reward", _POST, "any_key", "openai", "/rl/set_reward"),
    "/rl/end_session": Route("end_session", _POST, "session", "openai", "/rl/end_session"),
    "/rl/session": Route("session", ("GET", "POST"), "session", "openai", "/rl/session"),
    "/rl/exclude_session": Route("exclude", _POST, "admin", "openai", "/rl/exclude_session"),
    "/rl/export_trajectories": Route("export", _POST, "admin", "openai", "/rl/export_trajectories"),
    "/export_trajectories": Route("export", _POST, "admin", "openai", "/rl/export_trajectories"),
    "/health": Route("health", _READ, "none"),
    "/metrics": Route("metrics", _READ, "none"),
}
PREFIXES = ("/gateway/v1/v1", "/gateway/v1", "/gateway", "/v1/v1", "/v1", "")  # longest first


def find_route(path: str) -> Route | None:
    """The route of a decoded URL path, None if there is none. A trailing slash and doubled slashes mean nothing."""
    clean = "/" + "/".join(part for part in path.split("/") if part) if path.strip("/") else ""
    for prefix in PREFIXES:
        if clean == prefix or clean.startswith(prefix + "/"):
            rest = clean[len(prefix) :]
            found = ROUTES.get(rest)
            if found is not None:
                return found
            if rest.startswith("/models/"):  # one model, whose name may hold slashes
                return Route("model", _READ, "any_key", "openai", "/v1" + quote(rest))
    return None


def dialect_of(path: str) -> Dialect:
    """In whose shape an error for an unknown path is said: by the name of the protocol that stands in it."""
    if "/messages" in path:
        return "anthropic"
    return "responses" if "/responses" in path else "openai"
