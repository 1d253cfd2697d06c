"""Which proxy the channel's calls take: the environment's, as curl and pip read it. Nothing else in areal reads these variables (T103).

    proxy_for("https://taotoken.net/api/v1", os.environ)      # "http://proxy:3128", or None

https_proxy, http_proxy, all_proxy (lower case first); no_proxy names hosts, domains, host:port, addresses and networks (10.0.0.0/8), or
`*`. A loopback address takes the proxy too unless no_proxy names it, as everywhere. Errors: ConfigError for a proxy that is no HTTP proxy.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from areal.base.errors import ConfigError
from areal.base.redact import hint


def proxy_for(url: str, environment: Mapping[str, str]) -> str | None:
    """The proxy's URL for this address, None for a direct connection."""
    parts = urlsplit(url)
    found = _named(environment, f"{parts.scheme}_proxy") or _named(environment, "all_proxy")
    if not found or _excepted(parts.hostname or "", parts.port, _named(environment, "no_proxy")):
        return None
    proxy = found if "://" in found else f"http://{found}"
    if not _is_http(proxy):
        raise ConfigError(
            f"the proxy variable for {parts.scheme} addresses says {hint(proxy)!r}, which is no HTTP proxy; name one "
            f"(http://HOST:PORT), or put {parts.hostname} into NO_PROXY"
        )
    return proxy


def _is_http(proxy: str) -> bool:
    try:
        parts = urlsplit(proxy)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets or a port that are none
        return False


def _named(environment: Mapping[str, str], name: str) -> str:
    return (environment.get(name) or environment.get(name.upper()) or "").strip()


def _excepted(host: str, port: int | None, listed: str) -> bool:
    host = host.lower().rstrip(".")
    for entry in filter(None, (each.strip().lower() for each in listed.split(","))):
        if entry == "*" or _is_network(entry, host):
            return True
        name, _, wanted = entry.rpartition(":") if entry.rpartition(":")[2].isdigit() else (entry, "", "")
        if wanted and (port is None or int(wanted) != port):
            continue
        name = name.removeprefix("*").strip(".").removeprefix("[").removesuffix("]")
        if name and (host == name or host.endswith(f".{name}")):
            return True
    return False


def _is_network(entry: str, host: str) -> bool:
    """Whether the entry is an address or a network that the host, itself an address, lies in."""
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry.strip("[]"), strict=False)
    except ValueError:
        return False
