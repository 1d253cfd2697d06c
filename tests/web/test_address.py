"""Ports are bound once and named when taken; addresses are read and written with brackets where they need them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from areal.base.errors import ConfigError
from areal.web.address import (
    PortTaken,
    bind,
    format_url,
    is_loopback,
    port_holder,
    reachable_host,
    split_address,
    url_of,
)


def test_T093_a_taken_port_names_the_port_the_process_and_the_setting() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        for host in ("127.0.0.1", "0.0.0.0", "localhost"):
            with pytest.raises(PortTaken) as taken:
                bind(host, port, setting="--port")
            message = str(taken.value)
            assert str(port) in message
            assert "--port" in message
            assert f"pid {os.getpid()}" in message
            assert "\n" not in message
        assert port_holder(port).endswith(f"(pid {os.getpid()})")
    with bind("127.0.0.1", port) as again:  # free at once after it was closed
        assert again.getsockname()[1] == port


def test_T093_a_second_process_ends_at_once() -> None:
    program = (
        "import sys\nfrom areal.base.errors import ConfigError\nfrom areal.web.address import bind\n"
        "try: bind('127.0.0.1', int(sys.argv[1]))\nexcept ConfigError as e: print(e); sys.exit(2)"
    )
    with bind("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        second = subprocess.run([sys.executable, "-c", program, str(port)], capture_output=True, text=True, check=False)
    assert second.returncode == 2
    assert f"port {port} is taken by process" in second.stdout


def test_T093_automatic_ports_are_distinct() -> None:
    socks = [bind("127.0.0.1", 0) for _ in range(8)]
    assert len({sock.getsockname()[1] for sock in socks}) == 8
    for sock in socks:
        sock.close()


def test_T094_addresses_are_split_and_formatted_with_brackets() -> None:
    assert split_address("[::1]:30000") == ("::1", 30000)
    assert split_address("node-1:9000") == ("node-1", 9000)
    assert format_url("::1", 9000) == "http://[::1]:9000"
    assert format_url("10.0.0.1", 9000) == "http://10.0.0.1:9000"
    for text in ("::1:9000", "host", "host:", ":9000", "host:99999", "host:x", "[::1]", ""):
        with pytest.raises(ConfigError, match="brackets"):
            split_address(text)


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="no IPv6 on this host")
def test_T094_ipv6_hosts_bind_with_and_without_brackets() -> None:
    for host in ("::1", "[::1]"):
        with bind(host, 0) as sock:
            assert sock.family == socket.AF_INET6
            assert url_of(sock) == f"http://[::1]:{sock.getsockname()[1]}"


def test_T094_what_is_no_host_is_a_sentence() -> None:
    for host in ("::1:9000", "127.0.0.1:9000", "no-such-host.invalid", "203.0.113.7"):
        with pytest.raises(ConfigError, match=r"cannot listen on|may not listen"):
            bind(host, 0)


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_T093_what_is_no_port_is_a_sentence_and_no_other_port(port: int) -> None:
    with pytest.raises(ConfigError, match=rf"--port: {port} is no port"):
        bind("127.0.0.1", port, setting="--port")


def test_loopback_and_reachable_hosts() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "no-such-host.invalid"))
    assert reachable_host("10.1.2.3") == "10.1.2.3"
    assert reachable_host("0.0.0.0") not in ("0.0.0.0", "")
