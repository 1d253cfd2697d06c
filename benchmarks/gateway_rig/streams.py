"""What a streamed request costs: added latency, and CPU beside a bare forwarder and LiteLLM's proxy.

All places stand in front of the same fake backend and are measured in turn, in rounds, so that other load on the machine meets
all of them: `direct` (nothing between), `forwarder`, `gateway` (the fake backend in a worker's place), `service` (gateway and
worker: recorded, every answer in the durable store) and `LiteLLM`.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import orjson

from areal.models.fetch import resolve
from gateway_rig import litellm_proxy
from gateway_rig.client import CHAT, Connection, Refused, Reply, Talk, percentile, start_session
from gateway_rig.report import Report
from gateway_rig.stack import Running, Stack

EVENTS = 64
DELAY_MS = 2.0
TURNS = 4
CLIENTS = 16
WORDS = 40  # of each question; about 1.5 KB a request at first, 6 KB at the fourth


@dataclass(slots=True)
class Place:
    """Where requests are sent. key None: each conversation has a session of its own. parts: whose CPU counts."""

    name: str
    url: str
    key: str | None
    parts: tuple[Running, ...]
    leading_events: int = 0  # events of the answer before the backend's first
    cpu_ms: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)  # from sending to the first event
    chunk_ms: list[float] = field(default_factory=list)  # from the backend's sending to the client's reading

    async def keys(self, count: int, name: str) -> list[str]:
        """For so many conversations."""
        if self.key is not None:
            return [self.key] * count
        async with Connection(self.url) as connection:
            return [await start_session(connection, f"{name}-{number}") for number in range(count)]

    async def conversation(self, key: str) -> AsyncIterator[tuple[Reply, int]]:
        """Its turns one after the other: the answer, and CLOCK_MONOTONIC (ns) when it was asked for."""
        talk = Talk(words=WORDS)
        async with Connection(self.url) as connection:
            for _ in range(TURNS):
                sent = time.monotonic_ns()
                reply = await connection.post(CHAT, key, talk.body())
                yield reply, sent
                talk.said(reply.text())


async def run(report: Report, *, quick: bool) -> None:
    async with Stack() as stack, Stack() as beside:
        fake = await stack.script("fake_backend.py", "--events", str(EVENTS), "--delay-ms", str(DELAY_MS))
        places = await _places(stack, beside, fake, report)
        await _latency(report, places, fake, conversations=5 if quick else 40)
        await _cpu(report, places, rounds=1 if quick else 5, conversations=12 if quick else 40)
        gateway = next(place for place in places if place.name == "gateway").parts[0]
        report.figure("gateway: memory after all this", gateway.rss() / 2**20, "MB", at_most=150)


async def _places(stack: Stack, beside: Stack, fake: Running, report: Report) -> list[Place]:
    """beside: a run of its own, whose only worker is the fake backend."""
    model = str(resolve("smollm2-135m"))
    worker = await stack.worker("w0", fake, {"rollout.backend": "native:d1"}, model)
    front = await stack.gateway()
    key = await beside.register("w0", fake.url)
    forwarder, gateway = await beside.script("forwarder.py", fake.url), await beside.gateway()
    places = [
        Place("direct", fake.url, "none", ()),
        Place("forwarder", forwarder.url, "none", (forwarder,)),
        Place("gateway", gateway.url, key, (gateway,)),
        Place("service", front.url, None, (front, worker), leading_events=1),
    ]
    python = litellm_proxy.installed(report)
    if python is not None:
        proxy = await litellm_proxy.start(beside, python, fake.url)
        places.append(Place("LiteLLM", proxy.url, litellm_proxy.KEY, (proxy,)))
    return places


async def _latency(report: Report, places: list[Place], fake: Running, *, conversations: int) -> None:
    """One client, one request at a time."""
    report.heading(
        f"Added latency: {conversations} conversations of {TURNS} turns each, {EVENTS} chunks, one at a time"
    )
    own = [place for place in places if place.name != "LiteLLM"]
    async with Connection(fake.url) as stamps:
        for number in range(conversations):
            for place in own:
                (key,) = await place.keys(1, f"latency-{number}")
                async for reply, sent in place.conversation(key):
                    sent_at = orjson.loads((await stamps.post("/stamps", "", b"", "GET")).body)
                    _note_latency(place, reply, sent, sent_at, warm=number > 0)
    direct = own[0]
    bounds = {"forwarder": None, "gateway": (2.0, 10.0, 0.5, 5.0), "service": (10.0, 40.0, 1.0, 10.0)}
    for place in own[1:]:
        bound = bounds[place.name]
        added = [
            (f"{place.name}: {what}, p{share * 100:.0f}", percentile(mine, share) - percentile(theirs, share))
            for what, mine, theirs in (
                ("to the first chunk", place.first_ms, direct.first_ms),
                ("each chunk", place.chunk_ms, direct.chunk_ms),
            )
            for share in (0.5, 0.99)
        ]
        for index, (name, value) in enumerate(added):
            if bound is None:
                report.note(name, f"{value:10.2f} ms")
            else:
                report.figure(name, value, "ms", at_most=bound[index])


def _note_latency(place: Place, reply: Reply, sent: int, stamps: list[int], *, warm: bool) -> None:
    if not warm:
        return
    place.first_ms.append((reply.arrivals[0][0] - sent) / 1e6)
    backend_events = 0
    for arrived, seen in reply.arrivals:
        while backend_events < min(seen - place.leading_events, EVENTS):
            place.chunk_ms.append((arrived - stamps[backend_events]) / 1e6)
            backend_events += 1


async def _cpu(report: Report, places: list[Place], *, rounds: int, conversations: int) -> None:
    requests = conversations * TURNS
    report.heading(
        f"CPU per streamed request: {rounds} rounds of {requests} requests each, {EVENTS} chunks, {CLIENTS} at once"
    )
    measured = [place for place in places if place.parts]
    for place in measured:
        await _load(place, await place.keys(4, "warm"))
    for round_ in range(rounds):
        for place in measured:
            keys = await place.keys(conversations, f"cpu-{round_}")
            before = sum(part.cpu_s() for part in place.parts)
            await _load(place, keys)
            place.cpu_ms.append((sum(part.cpu_s() for part in place.parts) - before) / requests * 1e3)
    for place in measured:
        spread = f"{min(place.cpu_ms):.2f} .. {max(place.cpu_ms):.2f}"
        report.note(f"{place.name}: CPU per request", f"{statistics.median(place.cpu_ms):10.2f} ms   ({spread})")
    cost = {place.name: place.cpu_ms for place in measured}
    report.figure("gateway / forwarder", _ratio(cost["gateway"], cost["forwarder"]), at_most=1.5)
    if "LiteLLM" in cost:
        report.figure("LiteLLM / service", _ratio(cost["LiteLLM"], cost["service"]), at_least=8)


def _ratio(one: list[float], other: list[float]) -> float:
    """Median over the rounds."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


async def _load(place: Place, keys: list[str]) -> None:
    """One conversation under each of the keys."""
    left = iter(keys)

    async def client() -> None:
        for key in left:
            async for reply, _ in place.conversation(key):
                if len(reply.events()) < EVENTS:
                    raise Refused(f"{place.name} sent {len(reply.events())} events: {reply.body[-300:]!r}")

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
