"""The run's side of attaching: find a gateway that already runs, prove who we are, let it serve this run.

    handle = await find(["http://localhost:9000/gateway/v1"], say=print)      # None: nothing there, start your own
    await attach(handle, facts)               # RunFacts(run_id=…, pid=os.getpid(), store_url=…, …)
    await detach(handle, facts)

Connection refused: None at once. Something that accepts but does not answer yet: waited for, up to 60 s. A stranger on the
port: a sentence to `say`, and nothing is sent to it but a random number. Both ends run as one user on one host.
Errors: Conflict (the gateway serves another living run), Unavailable. Used by launch.py; control.py is the other side.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from areal.base.errors import ArealError, BackendError, BackendTimeout, Conflict, Unavailable
from areal.gateway import state
from areal.gateway.control import proof_of
from areal.gateway.state import RunFacts
from areal.web.address import format_url, is_loopback
from areal.web.client import JsonClient, UnexpectedAnswer

READY_WITHIN_S = 60.0
_ANSWER_WITHIN_S = 15.0
_LOOK_AGAIN_S = 0.2


@dataclass(frozen=True, slots=True)
class GatewayHandle:
    """A gateway that has proven itself. url: its base, without a path; run_id: the run it serves now; log: its gateway.log."""

    url: str
    port: int
    run_id: str | None = None
    log: str = ""


async def find(
    candidates: Iterable[str], *, say: Callable[[str], None], wait_s: float = READY_WITHIN_S
) -> GatewayHandle | None:
    """The first candidate base URL behind which a gateway of this user runs, None if there is none.

    say: takes a sentence for each candidate that something else holds."""
    seen: set[tuple[str, int]] = set()
    for candidate in candidates:
        host, port = _place(candidate)
        if (host, port) in seen:
            continue
        seen.add((host, port))
        if not is_loopback(host):
            say(f"{candidate} is on another host; a run attaches only to a gateway of its own host, so it is not used")
            continue
        for address in ("127.0.0.1", "::1") if host == "localhost" else (host,):
            url = format_url(address, port)
            if not await _accepts(address, port):
                continue
            handle = await _prove(url, port, say, time.monotonic() + wait_s)
            if handle is not None:
                return handle
    return None


async def attach(handle: GatewayHandle, facts: RunFacts) -> None:
    """Let this gateway serve the run. Raises Conflict if it serves another one that lives, Unavailable if it cannot."""
    other = state.read_run(handle.port)
    if other is not None and other.run_id != facts.run_id:
        raise Conflict(
            f"the gateway at {handle.url} serves run {other.run_id} (process {other.pid}); stop that run, or set another "
            "rollout.agent.gateway_port"
        )
    state.write(state.run_file(handle.port), facts)
    try:
        answer = await _call(handle, "attach", {})
        if answer.get("attached") != facts.run_id:
            raise Unavailable(f"the gateway at {handle.url} refused this run: {answer.get('reason')}")
    except ArealError:
        state.remove(state.run_file(handle.port), facts.pid)
        raise


async def detach(handle: GatewayHandle, facts: RunFacts) -> None:
    """Let go of the gateway. One that has ended meanwhile has nothing left to let go of."""
    state.remove(state.run_file(handle.port), facts.pid)
    if await _accepts(urlsplit(handle.url).hostname or "", handle.port):
        await _call(handle, "detach", {"run_id": facts.run_id})


def _place(candidate: str) -> tuple[str, int]:
    parts = urlsplit(candidate if "//" in candidate else f"//{candidate}")
    return parts.hostname or "localhost", parts.port or 80


async def _accepts(host: str, port: int) -> bool:
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), timeout=5)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def _prove(url: str, port: int, say: Callable[[str], None], deadline: float) -> GatewayHandle | None:
    """Let whatever listens there prove that it is a gateway of this user; say so if it cannot."""
    while True:
        facts = state.read_gateway(port)
        if facts is None:
            say(
                f"port {port} is held by something that is not a gateway of this user, so it is not used; "
                "give the run another port with rollout.agent.gateway_port, or stop that process"
            )
            return None
        nonce = secrets.token_urlsafe(24)
        try:
            async with JsonClient(url, timeout_s=max(0.1, deadline - time.monotonic())) as client:
                answer = await client.post("/control/challenge", {"nonce": nonce})
        except UnexpectedAnswer as error:
            if error.answered == 503 and time.monotonic() < deadline:
                await asyncio.sleep(_LOOK_AGAIN_S)
                continue
            answer = {}
        except BackendTimeout:
            say(f"the gateway at {url} accepts connections but did not answer in time; stop it and start it again")
            return None
        except BackendError:  # it went away, or what it says is not HTTP
            answer = {}
        if not _proven(answer, facts.secret, port, nonce):
            say(
                f"what answers at {url} is not the gateway that wrote {state.gateway_file(port)}, so it is not used; "
                "stop it, or set another rollout.agent.gateway_port"
            )
            return None
        return GatewayHandle(url, port, answer.get("run_id"), facts.log)


def _proven(answer: Any, secret: str, port: int, nonce: str) -> bool:
    if (
        not isinstance(answer, dict)
        or not isinstance(answer.get("nonce"), str)
        or not isinstance(answer.get("proof"), str)
    ):
        return False
    wanted = proof_of(secret, "challenge", port, nonce, answer["nonce"])
    return hmac.compare_digest(answer["proof"].encode(), wanted.encode())


async def _call(handle: GatewayHandle, call: str, body: dict[str, Any]) -> dict[str, Any]:
    """A proven control call. The secret is read anew: the gateway may have restarted since it was found."""
    facts = state.read_gateway(handle.port)
    if facts is None:
        raise Unavailable(f"the gateway at {handle.url} has ended; start it again, or let the run start its own")
    nonce = secrets.token_urlsafe(24)
    async with JsonClient(handle.url, timeout_s=_ANSWER_WITHIN_S) as client:
        answer = await client.post("/control/challenge", {"nonce": nonce})
        if not _proven(answer, facts.secret, handle.port, nonce):
            raise Unavailable(f"what answers at {handle.url} is not the gateway of this user; nothing was sent to it")
        proof = proof_of(facts.secret, call, handle.port, answer["nonce"])
        result = await client.post(f"/control/{call}", {"nonce": answer["nonce"], "proof": proof, **body})
    return dict(result)
