"""The routes of one configuration: which names lead to which model of the channel, with which defaults.

    routes = routes_of(config.api_gateway, config.model_routing)
    routes[0].request({"messages": [...]}, stream=False)       # the body that is sent

policy_model is a route only with `upstream: true`; otherwise the run's workers serve it, and its model_id is theirs. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal.config.upstream import ROLES, ApiGatewayConfig, ModelRole, ModelRoute, ModelRoutingConfig


@dataclass(frozen=True, slots=True)
class Route:
    """One model of the channel. timeout_s: of one attempt. names: the first is its role, the others are its model_id where that
    means no other model."""

    role: ModelRole
    config: ModelRoute
    timeout_s: float
    names: tuple[str, ...]

    @property
    def model_id(self) -> str:
        return self.config.model_id

    def request(self, body: Mapping[str, Any], *, stream: bool) -> dict[str, Any]:
        """A Chat Completions body with this route's model, and its defaults where the body names none (null counts as none)."""
        sent = {name: value for name, value in body.items() if name not in ("model", "stream")}
        if sent.get("temperature") is None and self.config.temperature is not None:
            sent["temperature"] = self.config.temperature
        if sent.get("max_tokens") is None and sent.get("max_completion_tokens") is None and self.config.max_tokens:
            sent["max_tokens"] = self.config.max_tokens
        return {"model": self.model_id, **sent, **({"stream": True} if stream else {})}


def upstream_names(gateway: ApiGatewayConfig | None, routing: ModelRoutingConfig | None) -> frozenset[str]:
    """Every name that means the channel."""
    return frozenset(name for route in (routes_of(gateway, routing) if gateway else ()) for name in route.names)


def routes_of(gateway: ApiGatewayConfig, routing: ModelRoutingConfig | None) -> tuple[Route, ...]:
    """Reward, judge, then the policy where it is upstream. A model_id that several share means the first of them."""
    configs: dict[ModelRole, ModelRoute] = {
        role: config for role in ROLES if (config := getattr(routing, role, None)) is not None
    }
    policy = configs.get("policy_model")
    taken: set[str] = set(configs)
    if policy is not None and not policy.upstream:
        taken.add(configs.pop("policy_model").model_id)
    found = []
    for role, config in configs.items():
        names = (role,) if config.model_id in taken else (role, config.model_id)
        taken.update(names)
        found.append(Route(role, config, config.timeout or gateway.timeout, names))
    return tuple(found)
