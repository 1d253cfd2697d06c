"""Commands that all ranks of a net run together, and what is said when they do not.

    leader = Leader(place, standing)                     # rank 0, also of a net of one
    await leader.connect(urls, token)
    reply = await leader.together(command, own, within_s=1800)    # sent to the others; `own` is what rank 0 does itself
    follower = Follower(place, ...)                      # the others: the same call, where there is nobody to send to

A rank that ends, that alone cannot do what the others can, or that is not done in time breaks the net: ProcessDied names it, with its
stack or its last lines, and every rank ends (worker.py); the run goes on from its last checkpoint when it is started again. What all refuse
alike is an answer like another. When a command is late the leader asks each rank where it stands. Who does not even answer hangs; else
who does not wait for the others does. A leader that says nothing by then hangs itself, and the others say so. Commands go over links of our own and not through
the process group: an idle rank waits in no collective, which would run out of time, and each can answer for itself.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from areal.base.errors import ProcessDied
from areal.cluster.log_tail import last_lines
from areal.engine.commands import Command, Done, Failed, Load, Publish, Standing, Where, Write
from areal.engine.link import Link
from areal.engine.place import Place

_LINES = 12  # of a rank's log or stack; the run shows the last 20 of what its leader says
LAST_RESORT = 1.5  # times `patience`: when a process that is late and has not been asked ends itself
_THREAD = re.compile(r"^(?=Thread 0x|Current thread 0x)", re.MULTILINE)
_ENGINE = "engine/performer.py"
R = TypeVar("R")


def patience(within_s: float) -> float:
    """Seconds that ranks are given to say the same, or where they stand."""
    return min(10.0, max(2.0, within_s / 4))


class Crew(Protocol):
    """What a rank is to the others of its net."""

    async def together(self, command: Command, own: Awaitable[R | Failed], *, within_s: float) -> R | Failed:
        """What `own` gave. Raises ProcessDied where the net is broken: no command can be run any more."""
        ...

    async def write(self, command: Write) -> list[Done | Failed]:
        """What each of the others said, once all did, beside whatever is commanded next. Raises ProcessDied as above."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Peer:
    name: str
    url: str
    link: Link
    writes: Link
    said_last: Callable[[], str]


class Leader:
    """Implements Crew for rank 0."""

    def __init__(self, place: Place, standing: Callable[[int], Standing]) -> None:
        self._place = place
        self._standing = standing
        self._token = ""
        self._peers: list[_Peer] = []
        self._links = AsyncExitStack()

    async def connect(self, urls: Sequence[str], token: str) -> None:
        """urls: of all ranks, in order."""
        self._token = token
        for rank, url in list(enumerate(urls))[1:]:
            link = await self._links.enter_async_context(Link(url, token))
            writes = await self._links.enter_async_context(Link(url, token))
            self._peers.append(_Peer(self._place.names[rank], url, link, writes, self._last_lines_of(rank)))

    async def close(self) -> None:
        await self._links.aclose()

    async def together(self, command: Command, own: Awaitable[R | Failed], *, within_s: float) -> R | Failed:
        loop = asyncio.get_running_loop()
        mine = asyncio.ensure_future(own)
        parts: dict[str, asyncio.Future[Any]] = {self._place.name: mine}
        parts |= {peer.name: asyncio.ensure_future(peer.link.ask(command)) for peer in self._peers}
        until, pending = loop.time() + within_s, set(parts.values())
        while pending:
            left = max(0.0, until - loop.time())
            done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if gone := [name for name, part in parts.items() if part in done and part.exception()]:
                raise ProcessDied(self._ended(gone[0], command))
            if not done:
                raise ProcessDied(await self._late(command, parts, within_s))
            if any(isinstance(part.result(), Failed) for part in done):
                until = min(until, loop.time() + patience(within_s))
        self._agree(command, {name: part.result() for name, part in parts.items()})
        return mine.result()

    async def write(self, command: Write) -> list[Done | Failed]:
        asked = await asyncio.gather(*(peer.writes.ask(command) for peer in self._peers), return_exceptions=True)
        replies: list[Done | Failed] = []
        for peer, said in zip(self._peers, asked, strict=True):
            if isinstance(said, ProcessDied):
                raise ProcessDied(self._ended(peer.name, command)) from said
            if isinstance(said, BaseException):
                raise said
            assert isinstance(said, Done | Failed)
            replies.append(said)
        return replies

    def _agree(self, command: Command, replies: Mapping[str, Any]) -> None:
        failed = {name: reply for name, reply in replies.items() if isinstance(reply, Failed)}
        alike = len(failed) == len(replies) and len({reply.kind for reply in failed.values()}) == 1
        written_by_us = isinstance(command, Publish) and failed.keys() == {self._place.name}
        if failed and not alike and not written_by_us:
            raise ProcessDied(_alone(command, failed))

    def _ended(self, name: str, command: Command) -> str:
        said = next(peer.said_last() for peer in self._peers if peer.name == name)
        return f"{name} ended in the middle of {_name(command)}. {said}"

    async def _late(self, command: Command, parts: Mapping[str, asyncio.Future[Any]], within_s: float) -> str:
        """Why it is not done: who failed alone, who hangs."""
        replies = {name: part.result() for name, part in parts.items() if part.done()}
        if failed := {name: reply for name, reply in replies.items() if isinstance(reply, Failed)}:
            return _alone(command, failed)
        standing: dict[str, Standing | None] = {
            self._place.name: self._standing(0)
        }  # first: it also holds off the last resort
        asked = await asyncio.gather(*(self._ask(peer, 2 * patience(within_s)) for peer in self._peers))
        standing |= {peer.name: said for peer, said in zip(self._peers, asked, strict=True)}
        said = [_not_done(command, within_s)]
        at_work = {name: one for name, one in standing.items() if one is not None and one.stack}
        if silent := [peer for peer in self._peers if standing[peer.name] is None]:
            said += [f"{peer.name} hangs: it does not even say where it stands. {peer.said_last()}" for peer in silent]
        elif busy := {name: one for name, one in at_work.items() if not one.waits}:
            said += [f"{name} hangs, here:\n{one.stack}" for name, one in busy.items()]
        else:
            said.append("All ranks wait for each other; where, their logs say")
        return ". ".join(said)

    async def _ask(self, peer: _Peer, within_s: float) -> Standing | None:
        """Over a link of its own: the first one's next answer is that of the command."""
        try:
            async with asyncio.timeout(within_s), Link(peer.url, self._token) as link:
                reply = await link.ask(Where(1))
        except (TimeoutError, ProcessDied):
            return None
        return reply if isinstance(reply, Standing) else None

    def _last_lines_of(self, rank: int) -> Callable[[], str]:
        place = self._place

        def said() -> str:
            if not place.logs:
                return "Its log is on another host"
            path, start = Path(place.logs[rank]), place.log_starts[rank]
            if stack := _stack_in(last_lines(path, start=start, n=500)):
                return f"Its stack, innermost call first:\n{stack}"
            lines = last_lines(path, start=start, n=_LINES)
            return f"Its last lines:\n{lines}" if lines else "It has written nothing"

        return said


class Follower:
    """Implements Crew for the other ranks."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.asked = False
        """Whether the leader wanted to know where this rank stands: it lives."""

    async def together(self, command: Command, own: Awaitable[R | Failed], *, within_s: float) -> R | Failed:
        mine, limit = asyncio.ensure_future(own), patience(within_s)
        self.asked = False
        await asyncio.wait({mine}, timeout=within_s + limit)
        if not mine.done() and not self.asked:
            raise ProcessDied(
                f"{self._place.names[0]} hangs: {_not_done(command, within_s)}, and the leader of this net has not even asked why"
            )
        return await mine

    async def write(self, command: Write) -> list[Done | Failed]:
        return []

    async def close(self) -> None:
        return None


def _stack_in(log: str) -> str:
    """Of the engine's thread, where the last resort has written the stacks of all."""
    blocks = [block for block in _THREAD.split(log) if _ENGINE in block]
    return "\n".join(blocks[-1].splitlines()[:_LINES]) if blocks else ""


def _alone(command: Command, failed: Mapping[str, Failed]) -> str:
    reasons = "; ".join(f"{name}: {reply.message}" for name, reply in failed.items())
    return f"{' and '.join(failed)} could not do {_name(command)}, which the other ranks could. {reasons}"


def _not_done(command: Command, within_s: float) -> str:
    limit = "scheduler.startup_timeout_seconds" if isinstance(command, Load) else "actor.step_timeout_seconds"
    return f"{_name(command)} was not done within {within_s:.0f} s ({limit})"


def _name(command: Command) -> str:
    return type(command).__name__
