"""What the gateway costs: CPU per streamed request, against a bare forwarder on the same stack and a raw TCP relay.

    python benchmarks/gateway_cpu.py [--requests 2000] [--events 32] [--concurrency 16]

Three processes are measured in turn, interleaved over rounds, in front of the same stand-in worker: `gateway` (keys, registry,
request ids, error shapes, metrics), `bare` (uvicorn + aiohttp and nothing else) and `relay` (asyncio, bytes only, no HTTP).
Prints CPU microseconds per request (user + system, from the process's own accounting), the ratios, the gateway's memory
and its start-up time. Loopback only; numbers depend on the machine, ratios less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import psutil

from areal.base.types import WorkerInfo
from areal.gateway.state import RunFacts
from areal.store import open_store, store_url
from areal.web.auth import SessionKeys

BARE = """
import asyncio, sys, aiohttp, uvloop
from areal.web.address import bind, url_of
from areal.web.serve import serve
UPSTREAM = sys.argv[1]
async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        for event in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{event}.complete"})
        return
    body = (await receive())["body"]
    headers = [(k.decode(), v.decode()) for k, v in scope["headers"] if k not in (b"host", b"content-length")]
    async with SESSION.request(scope["method"], UPSTREAM + scope["path"], data=body, headers=headers) as response:
        kept = [(k.lower(), v) for k, v in response.raw_headers if k.lower() != b"transfer-encoding"]
        await send({"type": "http.response.start", "status": response.status, "headers": kept})
        async for chunk in response.content.iter_any():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
async def main():
    global SESSION
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False) as SESSION:
        await serve(app, bind("127.0.0.1", 0), ready=lambda url: print(url, flush=True))
with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
"""

RELAY = """
import asyncio, sys, uvloop
from urllib.parse import urlsplit
from areal.web.address import bind, url_of
there = urlsplit(sys.argv[1])
async def pump(source, sink):
    while data := await source.read(65536):
        sink.write(data)
        await sink.drain()
    sink.close()
async def relay(reader, writer):
    inner, outer = await asyncio.open_connection(there.hostname, there.port)
    await asyncio.gather(pump(reader, outer), pump(inner, writer), return_exceptions=True)
async def main():
    sock = bind("127.0.0.1", 0)
    print(url_of(sock), flush=True)
    async with await asyncio.start_server(relay, sock=sock) as server:
        await server.serve_forever()
with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
"""

WORKER = """
import asyncio, sys, uvloop
from areal.web.address import bind, url_of
EVENTS = int(sys.argv[1])
EVENT = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":" word"}}]}\\n\\n'
CHUNK = b"%x\\r\\n%b\\r\\n" % (len(EVENT), EVENT)
HEAD = b"HTTP/1.1 200 OK\\r\\ncontent-type: text/event-stream\\r\\ntransfer-encoding: chunked\\r\\n\\r\\n"
async def connection(reader, writer):
    try:
        while True:
            head = await reader.readuntil(b"\\r\\n\\r\\n")
            length = [line for line in head.lower().split(b"\\r\\n") if line.startswith(b"content-length:")]
            await reader.readexactly(int(length[0][15:]))
            writer.write(HEAD)
            for _ in range(EVENTS):
                writer.write(CHUNK)
                await asyncio.sleep(0.001)
            writer.write(b"0\\r\\n\\r\\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()
async def main():
    sock = bind("127.0.0.1", 0)
    print(url_of(sock), flush=True)
    async with await asyncio.start_server(connection, sock=sock) as server:
        await server.serve_forever()
with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
"""


def start_script(source: str, argument: str) -> tuple[subprocess.Popen[str], str]:
    """A process that prints its URL once it listens."""
    process = subprocess.Popen([sys.executable, "-c", source, argument], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def start_gateway(folder: Path, facts: RunFacts) -> tuple[subprocess.Popen[bytes], str, float]:
    """The real gateway process, as a child of a run; also the seconds until it was ready."""
    ready = folder / "ready.json"
    spec = {
        "name": "gateway", "run_dir": str(folder), "run_token": "t", "ready_file": str(ready), "parent_pid": 0,
        "host": "127.0.0.1", "port": 0, "log_level": "info", "log_dir": None, "max_body_bytes": 1 << 20,
        "run_id": facts.run_id, "store_url": facts.store_url, "signing_key_path": facts.signing_key_path,
        "admin_api_key": facts.admin_api_key, "model_names": ["default"],
    }  # fmt: skip
    file = folder / "gateway.spec.json"
    file.touch(0o600)
    file.write_text(json.dumps(spec))
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "areal.gateway.server", "--spec", str(file)])
    while not ready.exists():
        if process.poll() is not None:
            raise SystemExit("the gateway did not start; its reason stands above")
        time.sleep(0.005)
    return process, json.loads(ready.read_text())["url"], time.perf_counter() - began


async def load(url: str, key: str, requests: int, concurrency: int) -> None:
    """`requests` streamed chat calls, `concurrency` at a time."""
    left = iter(range(requests))
    body = b'{"model":"default","stream":true,"messages":[{"role":"user","content":"' + b"x" * 1500 + b'"}]}'
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def client() -> None:
            for _ in left:
                async with session.post(f"{url}/v1/chat/completions", data=body, headers=headers) as response:
                    await response.read()
                    assert response.status == 200, response.status

        await asyncio.gather(*(client() for _ in range(concurrency)))


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


async def measure(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        os.environ["XDG_STATE_HOME"] = name
        folder = Path(name)
        url = store_url(folder / "store.sqlite")
        worker, worker_url = start_script(WORKER, str(arguments.events))
        bare, bare_url = start_script(BARE, worker_url)
        relay, relay_url = start_script(RELAY, worker_url)
        async with await open_store(url) as store:
            keys = SessionKeys.load(folder)
            facts = RunFacts(
                run_id="bench", pid=os.getpid(), store_url=url, signing_key_path=str(folder / "signing.key"),
                admin_api_key="bench-admin-key",
            )  # fmt: skip
            gateway, gateway_url, ready_s = start_gateway(folder, facts)

            async def beat() -> None:
                while True:
                    await store.registry.heartbeat(WorkerInfo("w0", worker_url, worker.pid, "host", time.time()))
                    await asyncio.sleep(2)

            beating = asyncio.create_task(beat())
            await asyncio.sleep(0.1)
            key, spent = keys.mint("w0"), {"gateway": [], "bare": [], "relay": []}
            places = {"gateway": (gateway, gateway_url), "bare": (bare, bare_url), "relay": (relay, relay_url)}
            try:
                for _, place in places.values():
                    await load(place, key, arguments.concurrency * 4, arguments.concurrency)
                for _ in range(arguments.rounds):
                    for name_, (process, place) in places.items():
                        before = cpu_seconds(process.pid)
                        await load(place, key, arguments.requests, arguments.concurrency)
                        spent[name_].append((cpu_seconds(process.pid) - before) / arguments.requests * 1e6)
                memory = psutil.Process(gateway.pid).memory_info().rss / 2**20
            finally:
                beating.cancel()
                for process in (gateway, bare, relay, worker):
                    process.terminate()
                    process.wait()
    cost = {name_: statistics.median(values) for name_, values in spent.items()}
    print(
        f"events per request {arguments.events}, concurrency {arguments.concurrency}, median of {arguments.rounds} rounds"
    )
    for name_, value in cost.items():
        print(f"{name_:8} {value:8.0f} us CPU per request   range {min(spent[name_]):.0f}..{max(spent[name_]):.0f}")
    print(f"gateway / bare forwarder  {cost['gateway'] / cost['bare']:.2f}")
    print(f"gateway / raw relay       {cost['gateway'] / cost['relay']:.2f}")
    print(f"gateway memory {memory:.0f} MB RSS (bound 150), ready in {ready_s:.2f} s (bound 3)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=600, help="per round and place")
    parser.add_argument("--events", type=int, default=32, help="in each answer")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
