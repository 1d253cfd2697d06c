"""The upstream channel for reward and judge models (S2's router file: `api_gateway`, `model_routing`)."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field

from areal.config.section import Section

ModelRole = Literal["reward_model", "judge_model", "policy_model"]
ROLES: tuple[ModelRole, ...] = get_args(ModelRole)


class ApiGatewayConfig(Section):
    base_url: str
    """Any OpenAI-compatible address. `https://h/api`, `…/api/v1` and `…/api/v1/chat/completions` mean the same: one version segment
    (v1, v4, v1beta), which is added where there is none, then /chat/completions."""
    api_key: str = Field(json_schema_extra={"secret": True})
    """Usually `${NAME}`, read from the environment."""
    timeout: float = Field(120.0, gt=0)
    """Seconds for one attempt: to the whole answer; of a stream to its first event, and from each to the next."""
    max_retries: int = Field(3, ge=0)
    """Further attempts after the first, on 429, 5xx, connection failure and time-out only. No other layer repeats a call."""
    backoff_seconds: float = Field(0.5, ge=0)
    """Wait before the second attempt; it doubles from one to the next up to 30 s, less a random half. Raise it where the channel
    limits rates without saying Retry-After."""
    retry_after_limit_seconds: float = Field(60.0, ge=0)
    """Longest wait that a Retry-After of the channel is granted before the next attempt."""
    deadline_seconds: float = Field(600.0, gt=0)
    """For one call with all its attempts and waits; then 504. Keep it above timeout."""
    queue_timeout_seconds: float = Field(30.0, ge=0)
    """How long a call of a route whose `concurrency` is reached waits for a place before it is refused with 429 and Retry-After."""
    breaker_failures: int = Field(5, ge=0)
    """After so many calls of a route in a row that failed with a refused connection, a time-out or 5xx (all their attempts), its further ones are
    refused at once with 503, so that a dead model holds nobody up. 0 = never."""
    breaker_seconds: float = Field(30.0, gt=0)
    """How long they are; then one call tries whether it is back."""


class ModelRoute(Section):
    model_id: str
    """The name the model has there; for policy_model a folder, hub id or bundled name."""
    temperature: float | None = Field(None, ge=0, le=2)
    """Where a call names none; 0 for judges; null = the model's own."""
    max_tokens: int | None = Field(None, ge=1)
    """Output limit where a call names none; null = the model's own."""
    timeout: float | None = Field(None, gt=0)
    """Seconds for one attempt of this route; null = api_gateway.timeout. Raise it for a model that is often too late."""
    upstream: bool = False
    """policy_model only, and only for a gateway without a run: send it to the channel instead of serving the trained policy."""
    concurrency: int = Field(32, ge=1)
    """Most calls of this route under way at once; further ones wait in line. Lower it to what the channel allows your key."""
    calls_per_minute: int | None = Field(None, ge=1)
    """Budget of calls in any 60 s; beyond it 429 with Retry-After, which scoring waits for. null = no bound."""
    budget_tokens: int | None = Field(None, ge=1)
    """Budget of prompt and output tokens in the life of one gateway; once spent, 429, and a run that it rewards starts no session. As the channel
    reports them; where it does not, or nobody waited for the end (a caller that left, a time-out), one for 4 bytes sent and one for each event
    received. Calls under way are finished, so up to `concurrency` of them go beyond it. null = no bound. Set it where a judge costs money."""


class ModelRoutingConfig(Section):
    policy_model: ModelRoute | None = None
    reward_model: ModelRoute | None = None
    judge_model: ModelRoute | None = None
