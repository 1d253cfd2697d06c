"""The service under fuzzing: gateway, two workers, scripted server and store on real sockets, in a thread with its own event loop.

    with Target.running(folder) as target:
        reply = target.send("POST", "/v1/chat/completions", body, headers)      # judged: no 5xx, no hang, JSON errors
        target.check()                                                          # the store holds no nonsense

The client's side is blocking and outside that loop, so a service that stalls is seen as one that does not answer in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import urlsplit

from areal.base.types import Limits, WorkerInfo
from areal.chat import scripted_renderer
from areal.config.rollout import AgentConfig, GenerationConfig
from areal.gateway.app import GatewayApp
from areal.gateway.attachment import Attachment
from areal.gateway.control import Control
from areal.gateway.splice import Splice
from areal.gateway.state import RunFacts
from areal.inference.app import WireApp
from areal.inference.client import HttpBackend
from areal.inference.router import Router
from areal.inference.scripted.engine import ScriptedEngine
from areal.inference.scripted.script import read_script
from areal.proxy.app import ProxyParts, build_proxy
from areal.store import open_store, store_url
from areal.store.base import Store
from areal.web.auth import SessionKeys
from tests.proxy.record_checks import check_exports, check_interactions
from tests.proxy.service import serving, until

T = TypeVar("T")
ADMIN = "admin-key-of-the-fuzzed-service"
TOKEN = "internal-token-of-the-fuzzed-service"
BODY_LIMIT = 8 << 20
AGENT = {"admin_api_key": ADMIN, "internal_token": TOKEN, "max_body_bytes": BODY_LIMIT, "refresh_timeout_seconds": 1}
DEADLINE_S = 30.0  # for one answer, on a slow and busy machine; a hang is one that never comes
FAILS = "please fail"  # a prompt with these words makes the inference server fail
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
LINES: list[Any] = [
    {"settings": {"max_context": 4096}},
    {"when": FAILS, "pieces": ["a", "b"], "fail": {"at": 0, "status": 503, "message": "a scripted failure"}},
    {"pieces": ["He", "y", "<|im_end|>"]},
    {"pieces": ["<think>", "hm", "</think>", "ok", "<|im_end|>"]},
    {"pieces": ["I call. ", CALL, "<|im_end|>"]},
    {"pieces": []},
    {"pieces": [{"hex": "e2"}, {"hex": "98"}, "x"], "finish": "length"},
]
# What the service may say of itself: everything else from 500 on is a bug.
SAID_ON_PURPOSE = {503: FAILS}
Header = tuple[str, str]


@dataclass(frozen=True)
class Reply:
    """An answer, read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes


class Wrong(AssertionError):
    """The service did what it never may."""


class _Traces(logging.Handler):
    """Bugs that were caught somewhere and went into the log with their trace."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(logging.Formatter().format(record))


class Target:
    """See the module. `key`: of the session that `begin` started last."""

    def __init__(self, folder: Path, loop: asyncio.AbstractEventLoop) -> None:
        self.folder, self._loop = folder, loop
        self.keys = SessionKeys.load(folder)
        self.url = ""
        self.worker_urls: list[str] = []
        self.requests = 0
        self._traces = _Traces()
        self._checked: set[str] = set()  # sessions that are over
        self.store: Store
        self.engine: ScriptedEngine
        self.key = ""

    @classmethod
    @contextmanager
    def running(cls, folder: Path, agent: Mapping[str, Any] = MappingProxyType({})) -> Iterator[Target]:
        """agent: keys of rollout.agent that are other than usual."""
        loop = asyncio.new_event_loop()
        target, started, stop = cls(folder, loop), threading.Event(), asyncio.Event()
        failure: list[BaseException] = []

        async def serve() -> None:
            async with AsyncExitStack() as stack:
                await target._start(stack, agent)
                started.set()
                await stop.wait()

        def run() -> None:
            try:
                loop.run_until_complete(serve())
            except BaseException as error:
                failure.append(error)
            finally:
                started.set()
                loop.close()

        thread = threading.Thread(target=run, name="fuzzed service")
        logging.getLogger().addHandler(target._traces)
        thread.start()
        started.wait()
        try:
            if not failure:
                target.begin()
                yield target
        finally:
            if not failure:
                loop.call_soon_threadsafe(stop.set)
            thread.join()
            logging.getLogger().removeHandler(target._traces)
            if failure:
                raise failure[0]

    async def _start(self, stack: AsyncExitStack, agent: Mapping[str, Any]) -> None:
        script = self.folder / "script.jsonl"
        script.write_text("".join(json.dumps(line) + "\n" for line in LINES))
        self.engine = ScriptedEngine(read_script(script), version=1)
        server = await stack.enter_async_context(serving(WireApp(self.engine, "run-token")))
        url = store_url(self.folder / "store.sqlite")
        self.store = await stack.enter_async_context(await open_store(url))
        await self.store.training.set_limits(Limits(max_concurrent=500, max_lag=1000, batch_groups=1000))
        for name in ("w0", "w1"):
            await self._start_worker(name, server, script, stack, agent)
        facts = RunFacts(
            run_id="fuzz",
            pid=os.getpid(),
            store_url=url,
            signing_key_path=str(self.folder / "signing.key"),
            admin_api_key=ADMIN,
            model_names=("default",),
            internal_token=TOKEN,
        )
        attachment = await stack.enter_async_context(Attachment(port=0, loopback=True))
        await attachment.attach(facts)
        splice = await stack.enter_async_context(Splice())
        app = GatewayApp(attachment, splice, Control(attachment, "secret"), loopback=True, body_limit=BODY_LIMIT)
        self.url = await stack.enter_async_context(serving(app))

    async def _start_worker(
        self, name: str, server: str, script: Path, stack: AsyncExitStack, agent: Mapping[str, Any]
    ) -> None:
        backend = HttpBackend("scripted", server, "run-token")
        stack.push_async_callback(backend.close)
        parts = ProxyParts(
            store=self.store,
            renderer=scripted_renderer(script),
            backend=Router([backend]),
            keys=self.keys,
            worker=name,
            agent=AgentConfig.model_validate({**AGENT, **agent}),
            defaults=GenerationConfig(),
            max_context=4096,
            closing_bound_s=2.0,
        )
        url = await stack.enter_async_context(serving(build_proxy(parts).app))
        self.worker_urls.append(url)

        async def beat() -> None:
            await self.store.registry.heartbeat(WorkerInfo(name, url, os.getpid(), "host", time.time()))

        async def beat_on() -> None:
            while True:
                await asyncio.sleep(2)
                await beat()

        await beat()
        beating = asyncio.create_task(beat_on())
        stack.callback(beating.cancel)

    def inside(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the service's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE_S)

    def begin(self, task: str = "fuzz") -> str:
        """A new session; its key is `key` from now on."""
        reply = self.send("POST", "/rl/start_session", json.dumps({"task_id": task}).encode(), [bearer(ADMIN)])
        if reply.status != 200:
            raise Wrong(f"no session could be started: {reply}")
        self.key = json.loads(reply.body)["api_key"]
        return self.key

    def send(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Iterable[Header] = (),
        *,
        url: str = "",
        host: str | None = None,
    ) -> Reply:
        """One well-formed request on a connection of its own. url: of another port of the service than the gateway's."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.address if host is None else host}"]
        lines += [f"{name}: {value}" for name, value in headers]
        if body or method == "POST":
            lines.append(f"Content-Length: {len(body)}")
        return self.send_raw("\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + body, method, url)

    def send_raw(self, data: bytes, method: str = "GET", url: str = "") -> Reply:
        """These bytes, which are a whole request; its answer."""
        self.requests += 1
        try:
            with self._connection(url=url) as link, contextlib.suppress(ConnectionError):
                with contextlib.suppress(ConnectionError):  # it may have answered before it read all
                    link.sendall(data)
                return self._read(link, method)
        except TimeoutError:
            raise Wrong(f"no answer within {DEADLINE_S:.0f} s to {data[:500]!r}") from None
        raise Wrong(f"the connection broke without an answer to {data[:500]!r}")

    def throw(self, data: bytes, patience_s: float = 0.05) -> None:
        """Any bytes: the service may answer, close or wait for more, and serves others as before."""
        self.requests += 1
        with self._connection(patience_s) as link, contextlib.suppress(ConnectionError, TimeoutError):
            link.sendall(data)
            first = link.recv(16)
            if first and not first.startswith(b"HTTP/1."):
                raise Wrong(f"{first!r} is no HTTP, in answer to {data[:500]!r}")

    def judge(self, reply: Reply, request: object) -> Reply:
        """Raises Wrong for what no client may see."""
        shown = f"{reply.status} {reply.headers} {reply.body[:500]!r} in answer to {str(request)[:2000]}"
        if reply.status >= 500 and SAID_ON_PURPOSE.get(reply.status, "\0") not in str(request):
            raise Wrong(shown)
        if reply.status in (429, 503) and not 1 <= int(reply.headers.get("retry-after", 0)) <= 30:
            raise Wrong(f"without a Retry-After: {shown}")
        if ADMIN.encode() in reply.body or TOKEN.encode() in reply.body:
            raise Wrong(f"a secret in {shown}")
        if self._traces.found:
            raise Wrong(f"a bug in the log after {shown}:\n{self._traces.found.pop()}")
        if reply.status >= 400 and reply.body:
            if reply.headers.get("content-type") != "application/json":
                raise Wrong(f"not JSON: {shown}")
            if not json.loads(reply.body, parse_constant=_no_constant)["error"]["message"]:
                raise Wrong(f"without a message: {shown}")
        elif reply.headers.get("content-type") == "application/json" and reply.body:
            json.loads(reply.body, parse_constant=_no_constant)
        return reply

    def check(self) -> None:
        """After a burst: nothing runs on, and the records are whole. Starts a new session for the next one."""
        if self.judge(self.send("GET", "/health"), "health").status != 200:
            raise Wrong("the gateway is not healthy any more")
        self.inside(until(lambda: json.loads(self.engine.calls())["running"] == 0, DEADLINE_S))
        recent = self.inside(self.store.reading.recent(1000))
        found = [one.session.id for one in recent if one.session.deleted_at is None]
        for name in (name for name in found if name not in self._checked):
            session = self.inside(self.store.sessions.get(name))
            assert session is not None
            check_interactions(session, self.inside(self.store.sessions.interactions(name)))
            exports = [self._export(name, style) for style in ("individual", "concat")]
            check_exports(*exports)
            if session.ending is None:
                self.inside(self.store.sessions.end(name, "ended"))
            self.inside(self.store.sessions.exclude(name))
            self._checked.add(name)
        self.begin()

    def _export(self, name: str, style: str) -> Any:
        body = json.dumps({"session_id": name, "style": style}).encode()
        reply = self.judge(self.send("POST", "/rl/export_trajectories", body, [bearer(ADMIN)]), "export")
        if reply.status != 200:
            raise Wrong(f"session {name!r} cannot be exported: {reply}")
        return json.loads(reply.body)

    @property
    def address(self) -> str:
        return urlsplit(self.url).netloc

    def calls(self) -> int:
        """How many requests the inference server got."""
        return len(json.loads(self.engine.calls())["calls"])

    def _connection(self, timeout_s: float = DEADLINE_S, url: str = "") -> socket.socket:
        host, _, port = urlsplit(url or self.url).netloc.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=timeout_s)

    def _read(self, link: socket.socket, method: str) -> Reply:
        answer = http.client.HTTPResponse(link, method=method)
        try:
            answer.begin()
            body = answer.read()
        except http.client.HTTPException as error:
            raise Wrong(f"no whole HTTP answer: {error!r}") from error
        return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, body)


def bearer(key: str) -> Header:
    return "Authorization", f"Bearer {key}"


def _no_constant(name: str) -> Any:
    raise Wrong(f"{name} is no JSON")
