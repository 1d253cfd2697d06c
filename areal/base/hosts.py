"""Whether a host, as it is written, is this machine by its loopback. Nothing is resolved, so a rebound name gains nothing.

    names_loopback("[::1]")                        # True; also 127.0.0.1, localhost, x.localhost
    url_names_loopback("http://evil.example:80")   # False; takes whole URLs and, as `//host:port`, Host headers

Used by config (default keys), gateway and dashboard (Host and Origin). What a name resolves to is web/address.is_loopback's.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from urllib.parse import urlsplit

_REMEMBERED = 64  # a port is called by few names, each with every request


@lru_cache(maxsize=_REMEMBERED)
def names_loopback(host: str) -> bool:
    """host: a name or an address, brackets allowed, no port."""
    host = host.removeprefix("[").removesuffix("]").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@lru_cache(maxsize=_REMEMBERED)
def url_names_loopback(url: str) -> bool:
    """The same of a URL's host; False for what is no URL."""
    try:
        return names_loopback(urlsplit(url).hostname or "")
    except ValueError:
        return False
