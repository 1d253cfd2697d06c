"""What counts as this machine, as it is written: the rule behind default keys, Host and Origin checks."""

from __future__ import annotations

import pytest

from areal.base.hosts import names_loopback, url_names_loopback


@pytest.mark.parametrize("host", ["localhost", "LocalHost", "a.localhost", "127.0.0.1", "127.8.9.1", "::1", "[::1]"])
def test_loopback(host: str) -> None:
    assert names_loopback(host)
    bracketed = f"[{host}]" if host == "::1" else host
    assert url_names_loopback(f"//{bracketed}:8090")
    assert url_names_loopback(f"http://{bracketed}/x")


@pytest.mark.parametrize(
    "host",
    ["", "0.0.0.0", "::", "10.0.0.1", "localhost.evil.example", "127.0.0.1.nip.io", "127.1", "evil", "1270.0.0.1"],
)
def test_everything_else(host: str) -> None:
    assert not names_loopback(host)
    assert not url_names_loopback(f"http://{host}:80/")


@pytest.mark.parametrize("url", ["http://[::1", "null", "//localhost@evil.example", "http://evil.example/#localhost"])
def test_what_only_looks_like_it(url: str) -> None:
    assert not url_names_loopback(url)
