"""What one route may do at once, in a minute, in all, and after failures: so that a slow or dead model holds nobody up.

    limits = RouteLimits("judge_model", config.model_routing.judge_model, config.api_gateway)
    async with limits.calling() as spent:          # waits in line for a place, or UpstreamLimit (429 full or spent, 503 taken for dead)
        ...
        spent(prompt_tokens, output_tokens)

The breaker counts calls, not attempts, that failed in a row with 5xx or a time-out; anything else that the model answers
closes it. While it is open one call at a time tries whether the model is back. One event loop; the clock is the loop's. Used by client.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from areal.base.errors import UpstreamBudget, UpstreamError, UpstreamLimit
from areal.config.upstream import ApiGatewayConfig, ModelRoute

_MINUTE_S = 60.0
Spend = Callable[[int, int], None]


class RouteLimits:
    """The limits of one route in one gateway."""

    def __init__(
        self, role: str, config: ModelRoute, gateway: ApiGatewayConfig, *, now: Callable[[], float] | None = None
    ) -> None:
        self._role, self._config, self._gateway = role, config, gateway
        self._now = now or (lambda: asyncio.get_running_loop().time())
        self._places = asyncio.Semaphore(config.concurrency)
        self._begun: deque[float] = deque()  # when the calls of the last minute began
        self._tokens = 0
        self._failures = 0  # in a row
        self._open_until: float | None = None
        self._trying = False  # whether the model is back

    @asynccontextmanager
    async def calling(self) -> AsyncIterator[Spend]:
        """A call, with all its attempts. Raises UpstreamLimit before it begins."""
        self._check_breaker()
        self._check_budget()
        try:
            async with asyncio.timeout(self._gateway.queue_timeout_seconds):
                await self._places.acquire()
        except TimeoutError:
            raise UpstreamLimit(
                f"{self._config.concurrency} calls of {self._role} are under way and none ended within {self._gateway.queue_timeout_seconds:g} s; "
                f"retry, or raise model_routing.{self._role}.concurrency",
            ) from None
        try:
            self._check_breaker()  # the calls before it may have failed meanwhile
            self._check_budget()
            trying = self._trying = self._open_until is not None
            self._begun.append(self._now())
            try:
                yield self._spend
            except UpstreamError as error:
                self._ended(failed=error.status >= 500)
                raise
            else:
                self._ended(failed=False)
            finally:
                if trying:
                    self._trying = False
        finally:
            self._places.release()

    def _check_breaker(self) -> None:
        if self._open_until is None:
            return
        left_s = self._open_until - self._now()
        if left_s > 0 or self._trying:
            raise UpstreamLimit(
                f"{self._role} failed {self._failures} times in a row and is left alone for a while; retry later, check the channel "
                f"(python scripts/check_channel.py), or set api_gateway.breaker_failures=0",
                status=503,
                retry_after_s=left_s,
            )

    def _check_budget(self) -> None:
        config, now = self._config, self._now()
        if config.budget_tokens is not None and self._tokens >= config.budget_tokens:
            raise UpstreamBudget(
                f"{self._role} has used {self._tokens} tokens of its {config.budget_tokens}; raise model_routing.{self._role}.budget_tokens and "
                "start the gateway anew (a run's own gateway: the run)",
                retry_after_s=30,
                should_retry=False,
            )
        while self._begun and now - self._begun[0] >= _MINUTE_S:
            self._begun.popleft()
        if config.calls_per_minute is not None and len(self._begun) >= config.calls_per_minute:
            raise UpstreamLimit(
                f"{self._role} has had its {config.calls_per_minute} calls of this minute; retry later, or raise "
                f"model_routing.{self._role}.calls_per_minute",
                retry_after_s=_MINUTE_S - (now - self._begun[0]),
            )

    def _spend(self, prompt_tokens: int, output_tokens: int) -> None:
        self._tokens += prompt_tokens + output_tokens

    def _ended(self, *, failed: bool) -> None:
        if not failed:
            self._failures, self._open_until = 0, None
            return
        self._failures += 1
        if 0 < self._gateway.breaker_failures <= self._failures:
            self._open_until = self._now() + self._gateway.breaker_seconds
