"""A run says that its gateway has gone, with the end of that one's log, and that it is back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from areal.base.guide import situation
from areal.gateway.attach import GatewayHandle
from areal.gateway.watch import watched
from areal.web.address import bind, url_of
from tests.ports import quiet_port
from tests.proxy.service import until


async def test_local_proxy_failed_is_said_once_with_the_end_of_the_log_and_so_is_its_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal.gateway.watch.LOOK_S", 0.02)
    said: list[str] = []
    (tmp_path / "gateway.log").write_text("ready\nout of memory\n")
    port = quiet_port()
    listener = bind("127.0.0.1", port)
    handle = GatewayHandle(url_of(listener), port, "run", str(tmp_path / "gateway.log"))
    async with watched(handle, say=said.append):
        listener.close()
        await until(lambda: said)
        listener = bind("127.0.0.1", port)
        await until(lambda: len(said) == 2)
        listener.close()
        await until(lambda: len(said) == 3)
    assert said[0].startswith(f"local proxy failed, gateway at localhost:{port} not reachable (")
    assert situation("gateway-unreachable").said_in(said[0])
    assert said[0].endswith("gateway.log ends with\nready\nout of memory")
    assert said[1] == f"the gateway at localhost:{port} is reachable again"
    assert said[2] == said[0]


async def test_a_watch_that_ends_while_the_gateway_answers_does_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a run stood still at its end: the cancellation came in the moment in which the connection was made, and was forgotten."""
    monkeypatch.setattr("areal.gateway.watch.LOOK_S", 0.0)
    listener = bind("127.0.0.1", 0)
    connect, met = asyncio.open_connection, asyncio.Event()

    def watch() -> list[asyncio.Task[Any]]:
        return [one for one in asyncio.all_tasks() if one.get_name() == "gateway-watch"]

    async def connect_and_be_cancelled(host: str, port: int) -> Any:
        made = await connect(host, port)
        if not met.is_set():
            asyncio.get_running_loop().call_soon(watch()[0].cancel)
            met.set()
        return made

    async with asyncio.timeout(30):
        async with watched(GatewayHandle(url_of(listener), listener.getsockname()[1], "run"), say=print):
            monkeypatch.setattr(asyncio, "open_connection", connect_and_be_cancelled)
            await met.wait()
            while watch():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    listener.close()
