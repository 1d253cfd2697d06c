"""What generates: token ids in, tokens with log-probs and versions out, streamed. One Protocol, one table.

    backend = connect("native", url="http://127.0.0.1:31000", token=run_token)
    async with aclosing(backend.generate(request)) as chunks:       # contextlib: leaving the block closes the stream
        async for chunk in chunks:
            ...

The wire has the shape of vLLM's /inference/v1/generate (docs/architecture.md, "Inference wire"). Closing the iterator
early aborts the request on the server. Errors: BackendError, BackendTimeout, ContextOverflow. No torch here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Protocol

from areal.base.types import GenerateRequest, TokenChunk


@dataclass(frozen=True, slots=True)
class BackendHealth:
    """What a server says of itself. max_context: most tokens of prompt + output. running, waiting: requests."""

    model: str
    version: int
    max_context: int
    running: int
    waiting: int
    kv_tokens_free: int


class Backend(Protocol):
    """A client of one inference server. Safe to use from many tasks of one event loop."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Chunks as tokens are sampled; the last one has a finish_reason. While the server is paused for new weights
        the stream waits and then goes on from the partial tokens under the new version."""
        ...

    async def health(self) -> BackendHealth: ...

    async def pause(self) -> None:
        """Stop sampling after the current engine step; running requests stay."""
        ...

    async def resume(self) -> None: ...

    async def load_weights(self, manifest: dict[str, Any], version: int, *, within_s: float | None = None) -> int:
        """Swap to the weights a weights.Source published (its manifest), all or nothing (swap.py). Returns the version now
        served. Raises WeightsRefused with the arrow that failed, or that was not through `within_s` seconds after the start; weights
        and label are then what they were."""
        ...

    async def close(self) -> None: ...
