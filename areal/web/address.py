"""Addresses of our own ports: bind first, then say which port it was; IPv6 and names included.

    sock = bind("::1", 0, setting="rollout.agent.gateway_port")
    url_of(sock)                       # http://[::1]:41873, with an address that other hosts can reach
    split_address("[::1]:30000")       # ("::1", 30000); "::1:30000" is refused

A port is bound once and kept: nothing picks a port, lets it go and hopes (T093). A taken port is one sentence that names
the port and, where /proc can be read, the process that holds it. No SO_REUSEPORT, so two services never answer in turn.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from pathlib import Path

from areal.base.errors import ConfigError

_BACKLOG = 2048


class PortTaken(ConfigError):
    """Somebody else listens there already; the command ends with exit code 2."""


def bind(host: str, port: int, *, setting: str = "the port") -> socket.socket:
    """A listening TCP socket. host: name, IPv4 or IPv6 address (brackets allowed); port 0 takes a free one.

    setting: the config key or flag that chose the port, named in the error. Raises PortTaken, ConfigError."""
    if not 0 <= port <= 65535:  # the resolver would take it modulo 65536
        raise ConfigError(f"{setting}: {port} is no port; give one from 1 to 65535, or 0 for a free one")
    host = host.removeprefix("[").removesuffix("]")
    family, address = _resolve(host, port, setting)
    # The protocol is named because asyncio sets TCP_NODELAY only then; without it small answers wait 40 ms for an ACK.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free, one in LISTEN is not
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if host == "::" else 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise _bind_error(error, host, port, setting) from error
    return sock


def url_of(sock: socket.socket) -> str:
    """The URL others use for this socket: the bound address, or this host's own where it listens on all of them."""
    host, port = sock.getsockname()[:2]
    return format_url(reachable_host(host), port)


def format_url(host: str, port: int) -> str:
    """`http://host:port`, IPv6 addresses in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def split_address(text: str) -> tuple[str, int]:
    """(host, port) of `host:port` or `[ipv6]:port`. Raises ConfigError for anything else, with what to write."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or not port.isdigit() or not 0 <= int(port) <= 65535 or (":" in host and not bracketed):
        raise ConfigError(f"address {text!r} is not host:port; an IPv6 address is written in brackets: [::1]:8090")
    return (host[1:-1] if bracketed else host), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this host can reach that address. Names count as loopback if everything they resolve to is."""
    host = host.removeprefix("[").removesuffix("]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass  # a name, not an address
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(entry[4][0])).is_loopback for entry in found)


def reachable_host(host: str) -> str:
    """The same host, or for a wildcard address the one this machine is seen under (no packet is sent)."""
    if host not in ("0.0.0.0", "::", ""):
        return host
    for family, outside in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((outside, 9))
            except OSError:  # no route in this family
                continue
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def port_holder(port: int) -> str:
    """`process NAME (pid N)` that listens on this port here, or "" where /proc does not tell."""
    sockets = {
        f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _listening(Path("/proc/net") / table, port)
    }
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if sockets & _open_files(process / "fd"):
                return f"process {(process / 'comm').read_text().strip()} (pid {process.name})"
        except OSError:  # ended meanwhile, or another user's
            continue
    return ""


def _open_files(folder: Path) -> set[str]:
    links = set()
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            links.add(os.readlink(folder / name))
    return links


def _resolve(
    host: str, port: int, setting: str
) -> tuple[socket.AddressFamily, tuple[str, int] | tuple[str, int, int, int]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen on host {host!r}: {error}; give a name or address of this machine, the port goes to {setting}"
        ) from None
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)  # `localhost` often is both; clients try IPv4 everywhere
    return found[0][0], found[0][4]  # type: ignore[return-value]


def _bind_error(error: OSError, host: str, port: int, setting: str) -> ConfigError:
    where = format_url(host, port).removeprefix("http://")
    if error.errno == errno.EADDRINUSE:
        holder = port_holder(port)
        return PortTaken(
            f"port {port} is taken{f' by {holder}' if holder else ''}: cannot listen on {where}; "
            f"stop that process or choose another port ({setting}; 0 takes a free one)"
        )
    if error.errno == errno.EACCES:
        return ConfigError(f"may not listen on {where}: ports below 1024 belong to root; choose another ({setting})")
    return ConfigError(f"cannot listen on {where}: {error.strerror}; give an address of this machine")


def _listening(table: Path, port: int) -> set[str]:
    try:
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
    except OSError:
        return set()
    listen_state = "0A"
    return {row[9] for row in rows if row[3] == listen_state and int(row[1].rpartition(":")[2], 16) == port}
