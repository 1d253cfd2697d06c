"""What generates: the Backend protocol, the table of backends, the wire's two ends, native and scripted servers.

    backend = connect("native", url, run_token)

No torch here, and none in anything but `native/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from areal.base.errors import ConfigError
from areal.inference.backend import Backend, BackendHealth
from areal.inference.client import LOAD_S, HttpBackend

# Name in `rollout.backend` -> a client of one of its servers, made from (url, run token, seconds to load weights).
BACKENDS: Mapping[str, Callable[[str, str, float], Backend]] = {
    "native": lambda url, token, load_s: HttpBackend("native", url, token, load_s=load_s),
    "scripted": lambda url, token, load_s: HttpBackend("scripted", url, token, load_s=load_s),
}


def connect(name: str, url: str, token: str, *, load_s: float = LOAD_S) -> Backend:
    """A client of one inference server. load_s: how long it may take to load weights. Raises ConfigError for an unknown name, listing the known ones."""
    try:
        factory = BACKENDS[name]
    except KeyError:
        known = ", ".join(sorted(BACKENDS))
        raise ConfigError(f"rollout.backend names {name!r}; the known backends are: {known}") from None
    return factory(url, token, load_s)


__all__ = ["BACKENDS", "Backend", "BackendHealth", "HttpBackend", "connect"]
