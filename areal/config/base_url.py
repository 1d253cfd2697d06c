"""Where the channel's calls go: every spelling of a base URL that people copy becomes one path (T101).

    endpoint("https://h/api/")                        # https://h/api/v1/chat/completions
    endpoint("https://h/api/v1/chat/completions")     # the same
    endpoint("https://h/api/paas/v4")                 # https://h/api/paas/v4/chat/completions

The rule: slashes are put in order, a `/chat/completions` at the end is dropped, `/v1` is added where the path has no version segment
(v1, v4, v1beta …), then comes `/chat/completions`. Two version segments, a query, a user name or another scheme is a ConfigError. Pure.
Used by load.py, so that a wrong address is said before anything starts, and by inference/upstream.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from areal.base.errors import ConfigError
from areal.base.redact import hint, redact

_VERSION = re.compile(r"v\d+[a-z0-9.]*", re.IGNORECASE)
_KEY = "api_gateway.base_url"


def endpoint(base_url: str) -> str:
    """The URL of chat completions. Raises ConfigError."""
    return f"{openai_base(base_url)}/chat/completions"


def openai_base(base_url: str) -> str:
    """What an OpenAI SDK wants as its base_url. Raises ConfigError."""
    text = base_url.strip()
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{_KEY}={_shown(text)!r} is no URL ({error}); write https://HOST/PATH") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{_KEY}={_shown(text)!r} is no http or https URL; write https://HOST/PATH")
    if parts.query or parts.fragment or parts.username or parts.password:
        raise ConfigError(
            f"{_KEY} holds more than an address; take the query or user name out, the key goes to api_gateway.api_key"
        )
    names = [name for name in parts.path.split("/") if name]
    if names[-2:] == ["chat", "completions"]:
        names = names[:-2]
    versions = [name for name in names if _VERSION.fullmatch(name)]
    if len(versions) > 1:
        raise ConfigError(
            f"{_KEY}={text!r} has {len(versions)} version segments ({', '.join(versions)}); keep one of them"
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    place = host if port is None else f"{host}:{port}"
    return "/".join([f"{parts.scheme}://{place}", *names, *([] if versions else ["v1"])])


def _shown(text: str) -> str:
    """Without a password, nor a key that was put here by mistake."""
    return redact(hint(text) if "://" in text else text)
