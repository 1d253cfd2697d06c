"""Whom a port on loopback answers: not what a page of another site sends from this user's browser.

    check_host(headers, "this gateway")        # raises Forbidden unless every Host names this machine (DNS rebinding)
    check_origin(headers, "this gateway")      # the same of every Origin, which browsers add and other clients do not

A name that an attacker lets resolve to 127.0.0.1 still stands in the Host header, so nothing is resolved here. Used by app.py, which
checks the Host on every port of ours that is on loopback, and by the gateway.
"""

from __future__ import annotations

from areal.base.errors import Forbidden
from areal.base.hosts import url_names_loopback
from areal.web.auth import RawHeaders


def check_host(headers: RawHeaders, what: str) -> None:
    """what: who is called, for the sentence. No Host at all is fine: no browser leaves it out."""
    for host in _all(headers, b"host"):
        if not url_names_loopback(f"//{host}"):
            raise Forbidden(
                f"{what} is bound to loopback, but was called as {host[:100]!r}; use http://127.0.0.1:PORT, or set "
                "rollout.agent.gateway_host"
            )


def check_origin(headers: RawHeaders, what: str) -> None:
    for origin in _all(headers, b"origin"):
        if not url_names_loopback(origin):
            raise Forbidden(
                f"pages of {origin[:100]!r} may not call {what}, which is on loopback; open a page of this machine"
            )


def _all(headers: RawHeaders, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in headers if key == name]
