"""Routing: a session stays where it is, new ones go where least runs, a dead server is left. Real scripted engines."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest

from areal.base.errors import BackendError, ConfigError, Unavailable
from areal.base.types import GenerateRequest, SamplingParams
from areal.inference import BACKENDS, HttpBackend, connect
from areal.inference.router import Router
from areal.inference.scripted.engine import ScriptedEngine
from areal.inference.scripted.script import read_script


def request(session: str) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=9, temperature=1.0)
    return GenerateRequest("r", session, np.array([97], dtype=np.int32), sampling, 0)


@pytest.fixture
def engines(tmp_path: Path) -> list[ScriptedEngine]:
    path = tmp_path / "script.jsonl"
    path.write_text('{"pieces": ["a", "b", "c"]}\n')
    return [ScriptedEngine(read_script(path)) for _ in range(3)]


async def play(router: Router, session: str) -> None:
    async with aclosing(router.generate(request(session))) as chunks:
        assert len([chunk async for chunk in chunks]) == 3


def played(engine: ScriptedEngine) -> list[str]:
    return [call["session_id"] for call in json.loads(engine.calls())["calls"]]


async def test_a_session_stays_on_its_server_and_new_ones_spread(engines: list[ScriptedEngine]) -> None:
    router = Router(engines)
    for _ in range(2):
        for session in ("s0", "s1", "s2", "s3"):
            await play(router, session)
    assert [played(engine) for engine in engines] == [["s0", "s3", "s0", "s3"], ["s1", "s1"], ["s2", "s2"]]
    assert router.running == [0, 0, 0]


async def test_a_new_session_goes_where_least_runs(engines: list[ScriptedEngine]) -> None:
    router = Router(engines)
    async with (
        aclosing(router.generate(request("long-0"))) as zero,
        aclosing(router.generate(request("long-1"))) as one,
    ):
        await anext(zero)
        await anext(one)
        assert router.running == [1, 1, 0]
        for session in ("s0", "s1"):
            assert router.place(session) == 2
    assert router.running == [0, 0, 0]
    router.forget("s0")
    assert router.place("s0") == 0


async def test_a_server_that_does_not_answer_loses_its_session(engines: list[ScriptedEngine]) -> None:
    gone = connect("native", "http://127.0.0.1:1", "token")
    router = Router([gone, engines[0]])
    with pytest.raises(BackendError, match="not reachable"):
        await play(router, "s")
    await play(router, "s")
    await play(router, "t")  # the dead server has fewer sessions, and is avoided
    assert played(engines[0]) == ["s", "t"]
    await gone.close()


def test_the_table_lists_the_known_backends() -> None:
    assert sorted(BACKENDS) == ["native", "scripted"]
    assert isinstance(connect("native", "http://127.0.0.1:1/", "token"), HttpBackend)
    with pytest.raises(ConfigError, match=r"'sglang'.*native, scripted"):
        connect("sglang", "http://127.0.0.1:1", "token")
    with pytest.raises(ConfigError, match="no inference server"):
        Router([])


async def test_requests_wait_while_no_server_is_in_service(engines: list[ScriptedEngine]) -> None:
    router = Router(engines)
    router.serve_from([])
    waiting = asyncio.create_task(play(router, "s0"))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done()
    router.serve_from([2])
    await waiting
    assert [played(engine) for engine in engines] == [[], [], ["s0"]]


async def test_a_server_that_is_out_gets_nothing_and_its_sessions_move(
    engines: list[ScriptedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    router = Router(engines, own=1)
    for session in ("s0", "s1"):
        await play(router, session)
    assert [len(played(engine)) for engine in engines] == [2, 0, 0]  # its own server, whatever runs there
    async with aclosing(router.generate(request("long"))) as chunks:
        await anext(chunks)
        router.serve_from([1, 2])
        assert len([chunk async for chunk in chunks]) == 2  # what streams goes on
    for session in ("s0", "s2"):
        await play(router, session)
    assert [played(engine) for engine in engines] == [["s0", "s1", "long"], ["s0"], ["s2"]]
    router.serve_from([0, 1, 2])
    await play(router, "s3")
    await play(router, "s2")
    assert (played(engines[0])[-1], played(engines[2])) == ("s3", ["s2", "s2"])
    router.serve_from([])
    monkeypatch.setattr("areal.inference.router.WAIT_S", 0.01)
    with pytest.raises(Unavailable) as refused:
        await play(router, "s0")
    assert (refused.value.status, refused.value.retry_after_s) == (503, 5)
