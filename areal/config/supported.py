"""What a valid configuration may ask for that this version does not do: refused with the reason, never ignored.

    reasons(config)                     # one sentence each; startable.py adds what keys need of each other

One table, one line per key. A line goes away in the change that builds what it refuses. Used by startable.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from areal.base.hosts import names_loopback
from areal.config.backend_spec import parse_backend
from areal.config.keys import keys_of
from areal.config.rollout import AgentConfig
from areal.config.run import RunConfig
from areal.config.upstream import ROLES, ModelRoute, ModelRoutingConfig

_PRINTED_TOKEN = "gateway-internal-token"  # as the second text prints it; web/auth.py has it too and lies above
_PLACEHOLDERS = ("你的", "your-", "<your", "YOUR_")


_OF_THE_POLICY = (
    "model_id",
    "temperature",
    "max_tokens",
    "upstream",
)  # of its route; the other keys are of calls to the channel


@dataclass(frozen=True, slots=True)
class Refusal:
    """path: the key. refuses: whether this value cannot be honoured. reason: a sentence that ends with the remedy."""

    path: str
    refuses: Callable[[Any], bool]
    reason: str


def _engine(name: str) -> Callable[[Any], bool]:
    return lambda text: parse_backend(text).name == name


REFUSALS: tuple[Refusal, ...] = (
    Refusal("scheduler.type", lambda t: t == "slurm", "Slurm is not part of this version; use scheduler.type=local"),
    Refusal(
        "scheduler.type",
        lambda t: t == "ray",
        "online mode needs the local or slurm scheduler, and ray is not part of this version; use scheduler.type=local",
    ),
    Refusal("rollout.backend", _engine("sglang"), "SGLang is not part of this version; use rollout.backend=native:d1"),
    Refusal("rollout.backend", _engine("vllm"), "vLLM is not part of this version; use rollout.backend=native:d1"),
    Refusal(
        "model_routing.policy_model.upstream",
        bool,
        "a run trains the model that it serves, and of one in the channel it would record nothing; set it to false (a gateway "
        "alone, `areal gateway --config FILE`, serves it so)",
    ),
)


def reasons(config: RunConfig) -> list[str]:
    """One line per thing that cannot start, in the order of the table; then what contradicts itself, then placeholders."""
    found = []
    for refusal in REFUSALS:
        value = _at(config, refusal.path)
        if value is not None and refusal.refuses(value):
            shown = f"={value}" if isinstance(value, str | int) and not keys_of(RunConfig)[refusal.path].secret else ""
            found.append(f"{refusal.path}{shown}: {refusal.reason}")
    return found + _contradictions(config) + _channel_in_vain(config) + placeholders(config)


def _contradictions(config: RunConfig) -> list[str]:
    agent, found = config.rollout.agent, []
    host = agent.gateway_host
    if agent.admin_api_key == AgentConfig().admin_api_key and host is not None and not names_loopback(host):
        found.append(
            f"rollout.agent.gateway_host={host}: the default admin key works on loopback only, because everybody knows it; "
            "set rollout.agent.admin_api_key to a secret of your own"
        )
    if agent.internal_token == _PRINTED_TOKEN and host is not None and not names_loopback(host):
        found.append(
            f"rollout.agent.gateway_host={host}: the internal token of the text works on loopback only, because everybody "
            "knows it; set rollout.agent.internal_token (api_key in the agent file) to a secret of your own"
        )
    if agent.internal_token and agent.internal_token == agent.admin_api_key:
        found.append("rollout.agent.internal_token is the admin key, which no agent may hold; set it to another secret")
    started = agent.mode == "online" and config.train_dataset.path and (agent.command or agent.framework)
    if agent.max_turns != AgentConfig().max_turns and not agent.internal_token and not started:
        found.append(
            f"rollout.agent.max_turns={agent.max_turns}: only sessions that open by themselves have a last turn; set "
            "rollout.agent.internal_token (or --agent-config FILE with an api_key), or take max_turns out"
        )
    servers = parse_backend(config.rollout.backend).size
    if config.weights.quorum > servers:
        found.append(
            f"weights.quorum={config.weights.quorum}: rollout.backend={config.rollout.backend} has only {servers} inference "
            "server(s); lower the first, or ask for more"
        )
    if config.total_train_steps < config.total_train_epochs:
        found.append(
            f"total_train_steps={config.total_train_steps} is less than total_train_epochs={config.total_train_epochs}, and an epoch has at "
            "least one step; lower the second too"
        )
    return found


def _channel_in_vain(config: RunConfig) -> list[str]:
    """Routes without a channel, and what is said of the policy's route that only calls to the channel have."""
    routing, found = config.model_routing or ModelRoutingConfig(), []
    for role in ROLES:
        route = getattr(routing, role)
        if route is not None and role != "policy_model" and config.api_gateway is None:
            found.append(
                f"model_routing.{role}: there is no channel to ask it in; set api_gateway (agent.gateway_config names its file)"
            )
    policy = routing.policy_model
    for key in ModelRoute.model_fields if policy is not None else ():
        value = getattr(policy, key)
        if key not in _OF_THE_POLICY and value != ModelRoute.model_fields[key].default:
            found.append(
                f"model_routing.policy_model.{key}={value}: the run serves the policy itself, so no call of it is bounded so; take it out"
            )
    return found


def placeholders(config: RunConfig) -> list[str]:
    """Values left as the texts print them for the reader to replace."""
    named: list[tuple[str, str]] = [("actor.path", config.actor.path)]
    named += [("rollout.agent.admin_api_key", config.rollout.agent.admin_api_key)]
    named += [("rollout.agent.internal_token", config.rollout.agent.internal_token or "")]
    if config.api_gateway:
        named += [
            ("api_gateway.api_key", config.api_gateway.api_key),
            ("api_gateway.base_url", config.api_gateway.base_url),
        ]
    for role in ("policy_model", "reward_model", "judge_model"):
        route = getattr(config.model_routing, role, None)
        if route is not None:
            named.append((f"model_routing.{role}.model_id", route.model_id))
    return [
        f"{path} is still the placeholder of the text it was copied from; put your own value there"
        for path, value in named
        if any(mark in value for mark in _PLACEHOLDERS)
    ]


def _at(config: Any, path: str) -> Any:
    """The value at a path; None also where a section above it is absent."""
    for name in path.split("."):
        config = getattr(config, name, None)
    return config
