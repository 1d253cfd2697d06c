"""The upstream channel for reward and judge models (S2's router file: `api_gateway`, `model_routing`)."""

from __future__ import annotations

from pydantic import Field

from areal.config.section import Section


class ApiGatewayConfig(Section):
    base_url: str
    """Any OpenAI-compatible address."""
    api_key: str = Field(json_schema_extra={"secret": True})
    """Usually `${NAME}`, read from the environment."""
    timeout: float = Field(120.0, gt=0)
    """Seconds for one attempt."""
    max_retries: int = Field(3, ge=0)
    """Further attempts after the first, on 429, 5xx, connection failure and time-out only."""


class ModelRoute(Section):
    model_id: str
    """The name the model has there; for policy_model a folder, hub id or bundled name."""
    temperature: float = Field(1.0, ge=0, le=2)
    """Where a call names none; 0 for judges."""
    max_tokens: int | None = Field(None, ge=1)
    """Output limit where a call names none; null = the model's own."""
    timeout: float | None = Field(None, gt=0)
    """Seconds for one attempt of this route; null = api_gateway.timeout."""
    upstream: bool = False
    """policy_model only: send it to the channel instead of serving the trained policy."""


class ModelRoutingConfig(Section):
    policy_model: ModelRoute | None = None
    reward_model: ModelRoute | None = None
    judge_model: ModelRoute | None = None
