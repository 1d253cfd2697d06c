"""A thread for the engine, and the engine as a Backend of this process for the HTTP edge.

    backend = NativeBackend(engine, name="smollm2-135m", receive=receive_through(run_dir))   # takes the engine over
    async for chunk in backend.generate(request): ...
    await backend.close()

What other tasks want (add, abort, pause, swap) is put in an inbox and happens between two steps; what a step sampled goes back
to the event loop in one call per step. A generator closed early aborts its request. If the engine itself breaks, `stopped`
says why, every stream ends with an error, and the process should end. Neighbours: engine.py, server.py.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import queue
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from areal import weights
from areal.base.errors import ArealError, BackendError, BadRequest, Unavailable, WeightsRefused
from areal.base.types import GenerateRequest, TokenChunk
from areal.inference.backend import BackendHealth
from areal.inference.native.base_model import BaseModel
from areal.inference.native.engine import Engine, Event
from areal.inference.native.grammars import Grammars, Matcher
from areal.inference.native.scheduler import Sequence
from areal.inference.swap import Attempt, Swap
from areal.models.dense import DenseNet
from areal.models.hf_weights import check_tensors

Receive = Callable[[Mapping[str, Any]], Mapping[str, Tensor]]
_Inbox = asyncio.Queue[TokenChunk | ArealError]
T = TypeVar("T")


def receive_through(run_dir: Path) -> Receive:
    """Fetch published weights by the transfer that their manifest names, one sink for all versions."""
    sinks: dict[str, weights.Sink] = {}

    def receive(manifest: Mapping[str, Any]) -> Mapping[str, Tensor]:
        name = str(manifest.get("transfer"))
        if name not in sinks:
            sinks[name] = weights.sink(name, run_dir)
        return sinks[name].receive(manifest)

    return receive


class NativeBackend:
    """Implements backend.Backend. Made and used inside one event loop."""

    def __init__(
        self,
        engine: Engine,
        *,
        name: str,
        receive: Receive,
        threads: int = 0,
        grammars: Grammars | None = None,
        base: BaseModel | None = None,
    ) -> None:
        """grammars: of the engine's model; None = requests with a grammar are refused. Closed with this. base: what adapters stand beside; None =
        they are refused."""
        self._engine = engine
        self._name = name
        self._receive = receive
        self._threads = threads
        self._grammars = grammars
        self._base = base
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[Sequence, _Inbox] = {}  # the event loop's alone
        self._loading = asyncio.Lock()
        self._swap = Swap(engine.version)
        self._swapping = threading.Lock()  # for _swap: asked for here, labelled in the engine's thread
        self._paused = False  # these two are the engine thread's
        self._stopping = False
        self._loop = asyncio.get_running_loop()
        self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="engine")
        self.stopped: asyncio.Future[None] = self._loop.run_in_executor(
            self._executor, self._run
        )  # raises what broke it
        self.stopped.add_done_callback(self._has_stopped)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """See Backend.generate."""
        self._must_live()  # its grammars end with the engine
        matcher = await self._matcher(request)
        self._must_live()
        sequence = self._engine.sequence_of(request, matcher)
        inbox: _Inbox = asyncio.Queue()
        self._streams[sequence] = inbox
        self._calls.put(lambda: self._engine.add(sequence))
        ended = False
        try:
            while not ended:
                event = await inbox.get()
                if isinstance(event, ArealError):
                    raise event
                ended = event.finish_reason is not None
                yield event
        finally:
            if self._streams.pop(sequence, None) is not None:
                self._calls.put(lambda: self._engine.abort(sequence))

    async def health(self) -> BackendHealth:
        """Counts may be a step old: the engine is not stopped for them."""
        scheduler = self._engine.scheduler
        return BackendHealth(
            model=self._name,
            version=self._engine.version,
            max_context=self._engine.settings.max_context,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_tokens_free=scheduler.kv_tokens_free,
        )

    async def pause(self) -> None:
        """Returns when the step in progress is over; nothing is sampled from then on."""
        await self._between_steps(lambda: self._set_paused(True))

    async def resume(self) -> None:
        await self._between_steps(lambda: self._set_paused(False))

    async def load_weights(self, manifest: dict[str, Any], version: int, *, within_s: float | None = None) -> int:
        """See Backend.load_weights: loaded, verified and packed aside while the engine goes on, then swapped between two steps (T065)."""
        with self._swapping:
            self._swap = self._swap.asked(version)
        attempt = Attempt()
        try:
            async with asyncio.timeout(within_s), self._loading:
                net = await asyncio.to_thread(self._build, manifest, version, attempt)
                attempt.arrow = "pause"
                await self._between_steps(lambda: self._label(attempt, net, version))
                await asyncio.to_thread(_return_freed_memory)
        except TimeoutError:
            if attempt.settle():  # else the engine was quicker: the version is served
                raise WeightsRefused(
                    attempt.arrow,
                    f"version {version} was still at {attempt.arrow!r} after {within_s:g} s (weights.load_timeout_seconds); version "
                    f"{self._engine.version} stays",
                ) from None
        return version

    async def close(self) -> None:
        """Stop after the current step; streams still open end with Unavailable."""
        self._calls.put(self._stop)
        await asyncio.wait({self.stopped})
        self._executor.shutdown()
        if self._grammars is not None:
            self._grammars.close()
        self._end_streams(Unavailable("the inference server is shutting down; send the request to another one"))

    async def _matcher(self, request: GenerateRequest) -> Matcher | None:
        """Raises BadRequest for a grammar that cannot be used."""
        if not request.grammar:
            return None
        if self._grammars is None:
            raise BadRequest("this server constrains no output: it was started without the model's tokenizer")
        return await self._grammars.matcher(request.grammar, request.sampling.stop_token_ids)

    def _build(self, manifest: dict[str, Any], version: int, attempt: Attempt) -> DenseNet:
        """In a worker thread. The net now served is only read."""
        serving = self._engine.net
        try:
            if manifest.get("version") != version:
                raise WeightsRefused("load", f"the manifest is of version {manifest.get('version')!r}, not {version}")
            tensors = self._receive(manifest)
            attempt.arrow = "verify"
            if (beside := manifest.get("adapter")) is not None:
                tensors = self._merged(tensors, beside)
            config = serving.config
            check_tensors(tensors, config.parameter_shapes(), config.router_bias_shapes(), finite=True)
            return DenseNet.from_tensors(
                serving.config,
                tensors,
                dtype=serving.dtype,
                device=serving.device,
                positions=self._engine.settings.max_context,
            )
        except (ArealError, OSError, RuntimeError) as error:
            arrow = error.arrow if isinstance(error, WeightsRefused) else attempt.arrow
            raise WeightsRefused(
                arrow,
                f"weights version {version} were not loaded, version {self._engine.version} stays: at {arrow!r}: {error}",
            ) from error

    def _merged(self, tensors: Mapping[str, Tensor], beside: Any) -> Mapping[str, Tensor]:
        if self._base is None:
            raise WeightsRefused(
                "load", "this server keeps no base that an adapter could stand beside; publish a whole model"
            )
        return self._base.with_adapter(tensors, beside)

    async def _between_steps(self, call: Callable[[], T]) -> T:
        """Run `call` in the engine's thread and wait for what it returns or raises."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(call())
            except ArealError as error:
                future.set_exception(error)

        self._must_live()
        self._calls.put(run)
        result = asyncio.wrap_future(future)
        either: set[asyncio.Future[Any]] = {result, self.stopped}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            raise Unavailable("the engine stopped meanwhile; see the inference server's log")
        return result.result()

    def _must_live(self) -> None:
        if self.stopped.done():
            raise Unavailable("the engine has stopped; see the inference server's log")

    # The engine's thread.

    def _run(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)
        while not self._stopping:
            self._take_calls(wait=self._paused or not self._engine.busy)
            if self._stopping or self._paused or not self._engine.busy:
                continue
            events = self._engine.step()
            if events:
                self._loop.call_soon_threadsafe(self._deliver, events)

    def _take_calls(self, *, wait: bool) -> None:
        """All that lie in the inbox; `wait` for the first one where there is nothing else to do."""
        try:
            while True:
                self._calls.get(block=wait)()
                wait = False
        except queue.Empty:
            return

    def _label(self, attempt: Attempt, net: DenseNet, version: int) -> None:
        """Between two steps: weights and label change together, or not at all."""
        with self._swapping:
            labelled = self._swap.labelled(version)
            if attempt.settle():  # its deadline has not passed
                self._engine.swap(net, version)
                self._swap = labelled

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _stop(self) -> None:
        self._stopping = True

    # The event loop.

    def _deliver(self, events: list[Event]) -> None:
        for sequence, event in events:
            inbox = self._streams.get(sequence)
            if inbox is None:
                continue
            inbox.put_nowait(event)
            if isinstance(event, ArealError) or event.finish_reason is not None:
                del self._streams[sequence]

    def _has_stopped(self, stopped: asyncio.Future[None]) -> None:
        reason = None if stopped.cancelled() else stopped.exception()
        if reason is not None:
            self._end_streams(BackendError(f"the engine broke: {type(reason).__name__}: {reason}"))

    def _end_streams(self, reason: ArealError) -> None:
        for inbox in self._streams.values():
            inbox.put_nowait(reason)
        self._streams.clear()


def _return_freed_memory() -> None:
    """Give the former weights' memory back to the system: glibc would keep it (450 MB of the 135M net, measured)."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):  # musl has none
            libc.malloc_trim(0)
