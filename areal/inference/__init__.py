"""What generates: the Backend protocol, the table of backends, the wire's two ends, native and scripted servers.

    backend = connect("native", url, run_token)

No torch here, and none in anything but `native/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from areal.base.errors import ConfigError
from areal.inference.backend import Backend, BackendHealth
from areal.inference.client import HttpBackend

# Name in `rollout.backend` -> a client of one of its servers, made from (url, run token).
BACKENDS: Mapping[str, Callable[[str, str], Backend]] = {
    "native": lambda url, token: HttpBackend("native", url, token),
    "scripted": lambda url, token: HttpBackend("scripted", url, token),
}


def connect(name: str, url: str, token: str) -> Backend:
    """A client of one inference server. Raises ConfigError for an unknown name, listing the known ones."""
    try:
        factory = BACKENDS[name]
    except KeyError:
        known = ", ".join(sorted(BACKENDS))
        raise ConfigError(f"rollout.backend names {name!r}; the known backends are: {known}") from None
    return factory(url, token)


__all__ = ["BACKENDS", "Backend", "BackendHealth", "HttpBackend", "connect"]
