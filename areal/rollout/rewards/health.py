"""Whether a reward source answers: one that is away costs no session anything, and the run waits for it with one sentence.

    health = Health(source, gate.hold, down_after_s=30, say=log_line, waiting=lambda: 12)
    await health.open()                                  # calls may be made
    health.answered(started)                             # of a call that began then
    mine = await health.away(error, case, started)       # returns when it answers again; whether it was this call's own fault
    health.limited(error)                                # calls may be made again after its wait

After a call that failed as Away it is asked something simple at growing pauses, and no other call is made meanwhile. If it answers at
once, the failure was that call's own. If it answers nobody for down_after_s (or refuses everybody: a wrong key), admission is held with
the reason and the log has a sentence; the first answer takes both back. A source without a probe of its own (a function) is asked the failed
calls again, in turn; one of them alone stops nobody, since the next session may show that it is that one's fault. A limit of calls in
time is no failure: all wait until it is over, and the log says it once. Used by scorer.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from areal.base.errors import StoreUnready
from areal.base.logs import announce
from areal.rollout.rewards.case import Case
from areal.rollout.rewards.source import Away, Limited, Source, Spent

FIRST_PAUSE_S = 0.5  # between two looks; doubled each time, up to half of down_after_s


class Health:
    """One event loop."""

    def __init__(
        self,
        source: Source,
        hold: Callable[[str], Awaitable[None]],
        *,
        down_after_s: float,
        say: Callable[[str], None],
        waiting: Callable[[], int],
    ) -> None:
        """hold: holds admission with a reason, "" lets it go on. waiting: how many sessions wait for their reward."""
        self._source, self._hold, self._say, self._waiting = source, hold, say, waiting
        self._down_after_s = down_after_s
        self._up = asyncio.Event()
        self._up.set()
        self._not_before = 0.0  # time.monotonic, of the next call under a limit
        self._limit_told = False
        self._shown = -1.0  # when the call began that was answered last
        self._news = asyncio.Event()  # a call that began after the failures was answered
        self._failing_since = 0.0
        self._met: dict[str, Case] = {}  # those that met it away and wait here
        self._cause: Away | None = None
        self._probing: asyncio.Task[bool] | None = None

    async def look(self) -> None:
        """Ask a source with a probe once before anybody needs it; returns when it answers."""
        if self._source.has_probe:
            self._up.clear()
            await self._answering()

    async def open(self) -> None:
        """Returns while calls may be made."""
        while True:
            await self._up.wait()
            left_s = self._not_before - time.monotonic()
            if left_s <= 0:
                return
            await asyncio.sleep(left_s)

    def limited(self, error: Limited) -> None:
        """It takes no more calls for a while."""
        self._not_before = max(self._not_before, time.monotonic() + error.wait_s)
        if not self._limit_told:
            self._limit_told = True
            announce(
                "Rewards", f"scoring goes on as fast as {self._source.name} may be asked, and waits in between: {error}"
            )

    def answered(self, started: float) -> None:
        """A call that began at `started` (time.monotonic) was answered, with whatever."""
        self._shown = max(self._shown, started)
        if started >= self._failing_since:
            self._news.set()

    async def away(self, error: Away, case: Case, started: float) -> bool:
        """Returns once it answers; True where it answers others, so that the failure is to be counted against this case."""
        if self._shown >= started and not isinstance(error, Spent):
            return True
        self._met[case.session_id], self._cause = case, error
        if self._source.has_probe or len(self._met) > 1:
            self._up.clear()
        try:
            return await self._answering() and not isinstance(error, Spent)
        finally:
            self._met.pop(case.session_id, None)

    async def close(self) -> None:
        """Stop asking."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.wait({self._probing})

    async def _answering(self) -> bool:
        """One loop for all that wait for it."""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._ask_until_it_answers(), name="probe of the reward source")
        return await asyncio.shield(self._probing)

    async def _ask_until_it_answers(self) -> bool:
        """Whether it was there all the time."""
        self._failing_since, since = time.monotonic(), time.time()
        self._news.clear()
        failed, held, pause = 0, False, FIRST_PAUSE_S
        while not await self._answers(failed):
            failed += 1
            if not held and self._is_down():
                held = True
                await self._held(self._reason(since))
                self._say(
                    f"{self._reason(since)}. {sessions(self._waiting())} wait for their reward, and nothing is dropped; it is asked again by "
                    "itself, and no session starts meanwhile"
                )
            await self._news_within(min(pause, self._down_after_s / 2))
            if self._news.is_set():
                break
            pause *= 2
        if held:
            await self._held("")
            self._say(f"{self._source.name} answers again after {time.time() - since:.0f} s; sessions start again")
        self._up.set()
        return failed == 0 or self._news.is_set()

    async def _held(self, reason: str) -> None:
        """A disk that is full meanwhile is waited for: it must not end a run whose judge is away, nor hold its admission for good."""
        while True:
            try:
                await self._hold(reason)
                return
            except StoreUnready:
                await asyncio.sleep(FIRST_PAUSE_S)

    async def _answers(self, failed: int) -> bool:
        """After so many failed looks. Where a limit refuses this one, nothing is known: it is made again once that is over."""
        while not self._news.is_set():
            cases = list(self._met.values())
            try:
                await self._source.probe(cases[failed % len(cases)] if cases else None)
            except Away as error:
                self._cause = error
                return False
            except Limited as error:
                self.limited(error)
                if failed == 0 and not self._met:  # nothing has failed yet
                    return True
                await self._news_within(error.wait_s)
            else:
                return True
        return True

    async def _news_within(self, wait_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._news.wait()

    def _is_down(self) -> bool:
        assert self._cause is not None
        late = time.monotonic() - self._failing_since >= self._down_after_s
        return not self._up.is_set() and (late or self._cause.wrong)

    def _reason(self, since: float) -> str:
        assert self._cause is not None
        at = time.strftime("%H:%M:%S", time.localtime(since))
        return self._cause.told(self._source.name, at)


def sessions(number: int) -> str:
    """So many, in words."""
    return f"{number} session{'' if number == 1 else 's'}"
