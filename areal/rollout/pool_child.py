"""One process of a ProcessPool: loads what it is told to, then calls it once per question, one at a time.

    python -m areal.rollout.pool_child FD        # FD: a socket that pool.py holds the other end of

Frames from the pool, a length of 4 bytes (big-endian) and so much JSON: first {"target", "key", "method", "memory_mb"}, answered with
{"ready": true} or {"error"}; then {"args", "kwargs"}, each answered with {"result"} or {"error"}. Answers are MessagePack, which has NaN. What is
called may be a plain function or a coroutine function; one loop serves all calls, so that connections may be kept. When the pool is gone this process ends, and with it all that it started, also in
the middle of a call. Standard output and error belong to the user's code.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import resource
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec

from areal.base.errors import ConfigError
from areal.cluster.process_tree import end
from areal.rollout.targets import load_target


class Setup(msgspec.Struct, frozen=True):
    """method: of the target, to be called; None = the target itself. memory_mb: most memory (RLIMIT_DATA)."""

    target: str
    key: str
    method: str | None
    memory_mb: int | None


class Call(msgspec.Struct, frozen=True):
    args: list[Any]
    kwargs: dict[str, Any]


def main(descriptor: int) -> None:
    """Serve until the pool is gone."""
    link = socket.socket(fileno=descriptor)
    threading.Thread(target=_end_with_the_pool, args=(link,), name="pool-watch", daemon=True).start()
    link.set_inheritable(False)
    with link.makefile("rb") as stream, asyncio.Runner() as runner:
        setup = msgspec.json.decode(_frame(stream), type=Setup)
        if setup.memory_mb is not None:
            _limit(setup.memory_mb * 2**20)
        try:
            function = _load(setup)
        except ConfigError as error:
            _answer(link, {"error": str(error)})
            return
        _answer(link, {"ready": True})
        while frame := _frame(stream):
            _answer(link, runner.run(_outcome(function, msgspec.json.decode(frame, type=Call))))


def _frame(stream: BinaryIO) -> bytes:
    """Empty at the end."""
    return stream.read(int.from_bytes(stream.read(4), "big"))


def _limit(size: int) -> None:
    """RLIMIT_DATA, at most what this process may have."""
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    size = size if most == resource.RLIM_INFINITY else min(size, most)
    resource.setrlimit(resource.RLIMIT_DATA, (size, size))


def _load(setup: Setup) -> Callable[..., Any]:
    found = load_target(setup.target, setup.key)
    function = found if setup.method is None else getattr(found, setup.method, None)
    if not callable(function):
        raise ConfigError(
            f"{setup.key}: {setup.target} {f'has no {setup.method}' if setup.method else 'is no function'}"
        )
    return function  # type: ignore[no-any-return]


async def _outcome(function: Callable[..., Any], call: Call) -> dict[str, Any]:
    """Its result or its error, whatever that is; SystemExit ends this process, which the pool sees."""
    running = asyncio.ensure_future(_called(function, call))
    await asyncio.wait({running})
    if running.cancelled():
        return {"error": "CancelledError: it cancelled itself"}
    if (error := running.exception()) is not None:
        traceback.print_exception(error)
        return {"error": f"{type(error).__name__}: {error}"}
    return {"result": running.result()}


async def _called(function: Callable[..., Any], call: Call) -> Any:
    result = function(*call.args, **call.kwargs)
    return await result if inspect.isawaitable(result) else result


def _answer(link: socket.socket, answer: dict[str, Any]) -> None:
    try:
        data = msgspec.msgpack.encode(answer, enc_hook=_plain)
    except (TypeError, ValueError, OverflowError) as error:
        data = msgspec.msgpack.encode({"error": f"TypeError: what it returned is no JSON value: {error}"})
    sys.stdout.flush()
    sys.stderr.flush()
    link.sendall(len(data).to_bytes(4, "big") + data)


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch."""
    if callable(getattr(value, "item", None)):
        return value.item()
    raise TypeError(f"{type(value).__name__} {value!r:.80}")


def _end_with_the_pool(link: socket.socket) -> None:
    gone = getattr(select, "POLLRDHUP", 0) | select.POLLHUP
    poll = select.poll()
    poll.register(link, gone)
    poll.poll()
    end("", leader=os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
