"""Many sessions: a thousand streams at once, what an idle session takes, and whether abandoned ones leave anything behind.

Each through the gateway and a worker of their own, against the scripted server or the fake backend.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import aiohttp

from gateway_rig.client import CHAT, Connection, Refused, Talk, percentile, start_session
from gateway_rig.report import Report
from gateway_rig.stack import Running, Stack

TOKEN_S = 0.5
EXPIRE_S = 4.0  # of an abandoned session
CLIENTS = 32


@dataclass(slots=True)
class _Outcome:
    """Of all streams together. late_ms: how much later than TOKEN_S after the one before it each token came."""

    tokens: int = 0
    late_ms: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


async def run_streams(report: Report, *, quick: bool) -> None:
    """1,000 concurrent streaming sessions at 2 tokens/s each."""
    sessions, tokens, turns = (200, 10, 1) if quick else (1000, 60, 2)
    report.heading(
        f"{sessions} concurrent streaming sessions at {1 / TOKEN_S:g} tokens/s, {turns} x {tokens} tokens each"
    )
    async with Stack() as stack:
        line = {"pieces": [f" {k}" for k in range(tokens)], "finish": "length", "delay_ms": TOKEN_S * 1000}
        server, script = await stack.scripted([line])
        config = {"rollout.backend": "scripted:d1", "rollout.scripted.path": str(script)}
        parts = (await stack.gateway(), await stack.worker("w0", server, config), server)
        outcome, before, began = _Outcome(), [part.cpu_s() for part in parts], time.perf_counter()
        own = time.process_time()
        await asyncio.gather(*(_stream(outcome, parts[0].url, n, sessions, tokens, turns) for n in range(sessions)))
        wall = time.perf_counter() - began
        shares = [f"{part.name} {(part.cpu_s() - was) / wall:.2f}" for part, was in zip(parts, before, strict=True)]
        report.note("cores busy", ", ".join([*shares, f"clients {(time.process_time() - own) / wall:.2f}"]))
    for error in sorted(set(outcome.errors))[:5]:
        report.note("an error", error)
    report.figure("errors", len(outcome.errors), at_most=0)
    report.figure("tokens that arrived, of all", outcome.tokens / (sessions * tokens * turns), at_least=1)
    if outcome.late_ms:
        report.figure("a token is late by, p50", percentile(outcome.late_ms, 0.5), "ms", at_most=100)
        report.figure("a token is late by, p99", percentile(outcome.late_ms, 0.99), "ms", at_most=1000)


async def _stream(outcome: _Outcome, url: str, number: int, sessions: int, tokens: int, turns: int) -> None:
    await asyncio.sleep(
        number / sessions * TOKEN_S * tokens / 4
    )  # all are there in the first quarter of the first answer
    try:
        async with Connection(url) as connection:
            key, talk = await start_session(connection, f"stream-{number}"), Talk(words=6)
            for _ in range(turns):
                reply = await connection.post(CHAT, key, talk.body())
                talk.said(reply.text())
                _note_lateness(outcome, reply.arrivals, tokens)
    except (Refused, OSError) as error:
        outcome.errors.append(f"{type(error).__name__}: {error}"[:200])


def _note_lateness(outcome: _Outcome, arrivals: list[tuple[int, int]], tokens: int) -> None:
    """Event 0 says that the answer begins, events 1 to `tokens` carry one token each."""
    seen = 1
    before: int | None = None
    for arrived, events in arrivals:
        while seen < min(events, tokens + 1):
            if before is not None:
                outcome.late_ms.append((arrived - before) / 1e6 - TOKEN_S * 1e3)
            before = arrived
            outcome.tokens += 1
            seen += 1


async def run_idle(report: Report, *, quick: bool) -> None:
    """Memory of a session that rests: 4 turns of 500 tokens, let go of to the store."""
    sessions, timeout_s = (100, 40) if quick else (1000, 160)
    report.heading(f"Memory of {sessions} idle sessions of 4 turns x 500 tokens")
    async with Stack() as stack:
        fake = await stack.script("fake_backend.py", "--events", "4", "--tokens", "100", "--delay-ms", "0")
        from areal.models.fetch import resolve

        config = {"rollout.backend": "native:d1", "rollout.agent.session_timeout_seconds": timeout_s}
        worker = await stack.worker("w0", fake, config, str(resolve("smollm2-135m")))
        gateway = await stack.gateway()
        parts = (gateway, worker)
        await _many(range(50), lambda number: _four_turns(gateway.url, f"warm-{number}"))
        before = _memory(parts)
        keys = await _many(range(sessions), lambda number: _four_turns(gateway.url, f"idle-{number}"))
        held = await _until_let_go(worker, 0)
        report.note(f"while the worker holds them ({held})", f"{(_memory(parts) - before) / sessions / 1000:10.2f} KB")
        held = await _until_let_go(worker, timeout_s)
        report.figure("sessions still held by the worker", held, at_most=0)
        report.figure("idle session", (_memory(parts) - before) / sessions / 1000, "KB", at_most=100)
        key, talk = keys[0]
        async with Connection(gateway.url) as connection:
            reply = await connection.post(CHAT, key, talk.body())
        report.figure("a session that rested goes on", float(bool(reply.text())), at_least=1)


async def _four_turns(url: str, task_id: str) -> tuple[str, Talk]:
    """100 tokens are asked and 400 answered in each turn, more or less."""
    async with Connection(url) as connection:
        key, talk = await start_session(connection, task_id), Talk(words=90)
        for _ in range(4):
            talk.said((await connection.post(CHAT, key, talk.body())).text())
    return key, talk


async def _until_let_go(worker: Running, bound_s: float) -> int:
    """How many sessions the worker holds in the end."""
    async with aiohttp.ClientSession() as session:
        deadline = time.monotonic() + bound_s
        while True:
            async with session.get(f"{worker.url}/health") as response:
                held = int((await response.json())["sessions"])
            if not held or time.monotonic() > deadline:
                return held
            await asyncio.sleep(1)


async def run_abandoned(report: Report, *, quick: bool) -> None:
    """Sessions that are started and never seen again; one in ten has made a call. They expire after some seconds."""
    sessions, slices = (3000, 6) if quick else (100_000, 10)
    report.heading(f"{sessions} abandoned sessions, one in ten after a call")
    async with Stack() as stack:
        server, script = await stack.scripted([{"pieces": ["Let", " me", " see", "."]}])
        config = {
            "rollout.backend": "scripted:d1",
            "rollout.scripted.path": str(script),
            "rollout.agent.session_timeout_seconds": EXPIRE_S,
        }
        worker, gateway = await stack.worker("w0", server, config), await stack.gateway()
        parts = (gateway, worker, server)
        marks: list[list[int]] = []
        began = time.perf_counter()
        for number in range(slices):
            part = range(number * sessions // slices, (number + 1) * sessions // slices)
            await _many(part, lambda n: _abandon(gateway.url, n))
            await _until_expired(stack, EXPIRE_S * 10)
            marks.append([one.rss() for one in parts])
        rate = sessions / (time.perf_counter() - began)
        held, running = await _until_let_go(worker, EXPIRE_S * 2), await _until_expired(stack, 0)
    report.note("sessions started and ended", f"{rate:10.0f} per second")
    warm = marks[len(marks) // 5]
    for part, first, last in zip(parts, warm, marks[-1], strict=True):
        report.note(f"{part.name}: memory", f"{first / 2**20:10.1f} MB, at the end {last / 2**20:.1f} MB")
    grown = sum(marks[-1]) - sum(warm)
    counted = sessions * (slices - 1 - len(marks) // 5) / slices
    report.figure("growth per abandoned session", max(0.0, grown / counted), "bytes", at_most=1000 if quick else 100)
    report.figure("sessions still held or running", held + running, at_most=0)


async def _until_expired(stack: Stack, bound_s: float) -> int:
    """How many sessions run in the end."""
    deadline = time.monotonic() + bound_s
    while True:
        running = (await stack.store.training.counts()).running_sessions
        if not running or time.monotonic() > deadline:
            return running
        await asyncio.sleep(0.2)


async def _abandon(url: str, number: int) -> None:
    async with Connection(url) as connection:
        key = await start_session(connection, f"abandoned-{number}")
        if number % 10 == 0:
            (await connection.post(CHAT, key, Talk(words=6).body())).text()


async def _many(numbers: Iterable[int], work: Callable[[int], object]) -> list:
    """work(number) of all numbers, CLIENTS at a time; what they return."""
    left, found = iter(numbers), []

    async def client() -> None:
        for number in left:
            found.append(await work(number))

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return found


def _memory(parts: Iterable[Running]) -> int:
    return sum(part.rss() for part in parts)
