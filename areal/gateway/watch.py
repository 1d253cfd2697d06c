"""A gateway that a run did not start itself: that it has gone is said, once, and that it is back.

    async with watched(handle, say=warn):          # for as long as the run uses it
        ...

Agents reach a run through its gateway alone, so a run whose gateway has died waits for sessions that cannot come, and nothing in its own
log would tell why. Nothing else is done about it: a gateway that is started again on its port serves the same run (attachment.py),
its keys and sessions stay good. A gateway of the run's own is a child whose death ends the run. Used by launch.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from areal.base.background import background
from areal.base.guide import GATEWAY_UNREACHABLE
from areal.cluster.log_tail import last_lines
from areal.gateway.attach import GatewayHandle

LOOK_S = 2.0
_ANSWER_WITHIN_S = 5.0
_TAIL = 8  # lines of its log


@asynccontextmanager
async def watched(handle: GatewayHandle, *, say: Callable[[str], None]) -> AsyncIterator[None]:
    """say: takes the sentence, with the end of the gateway's log."""
    async with background(_watch(handle, say), name="gateway-watch"):
        yield


async def _watch(handle: GatewayHandle, say: Callable[[str], None]) -> None:
    host, missed = urlsplit(handle.url).hostname or "localhost", 0
    place = f"{'localhost' if host in ('127.0.0.1', '::1') else host}:{handle.port}"
    while True:
        await asyncio.sleep(LOOK_S)
        reason = await _refusal(host, handle.port)
        if not reason:
            if missed > 1:
                say(f"the gateway at {place} is reachable again")
            missed = 0
            continue
        missed += 1
        if missed == 2:  # one look may fall into a restart
            tail = last_lines(Path(handle.log), n=_TAIL) if handle.log else ""
            ended = f"; {handle.log} ends with\n{tail}" if tail else ""
            say(GATEWAY_UNREACHABLE.text(place=place, reason=reason, port=handle.port) + ended)


async def _refusal(host: str, port: int) -> str:
    """Why nothing accepts there; empty if something does."""
    try:
        async with asyncio.timeout(
            _ANSWER_WITHIN_S
        ):  # wait_for of Python 3.11 forgets a cancellation that meets the answer
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return f"no answer within {_ANSWER_WITHIN_S:.0f} s"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    writer.close()
    return ""
