#!/usr/bin/env python3
"""One call through the upstream channel, before anything is trained: are key, base_url and model id right?

    export TAOTOKEN_API_KEY=…
    python scripts/check_channel.py                       # prints the answer, for example 通了
    python scripts/check_channel.py --model judge_model --config configs/taotoken_router.yaml

The address, the key and the model come from the router file, as the gateway reads it; proxies from the environment. The call is made
once, with the OpenAI SDK. Exit codes: 0 the channel answered · 1 it failed, or its answer has no choices (its body is shown) · 2 the
file or a variable is wrong · 3 the key · 4 base_url · 5 the model id.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import openai

from areal.base.errors import ArealError, UpstreamError
from areal.base.redact import protect, redact
from areal.config.base_url import openai_base
from areal.config.load import load_config
from areal.config.supported import placeholders
from areal.config.upstream import ROLES, ApiGatewayConfig, ModelRoute, ModelRoutingConfig
from areal.inference.upstream.answers import read_answer
from areal.inference.upstream.client import check_key
from areal.inference.upstream.proxies import proxy_for
from areal.inference.upstream.routes import Route

ROUTER_FILE = "configs/taotoken_router.yaml"
FAILED, CONFIG, KEY, BASE_URL, MODEL_ID = range(1, 6)
PARTS = {
    KEY: "the key is wrong: api_gateway.api_key",
    BASE_URL: "the base_url is wrong: api_gateway.base_url",
    MODEL_ID: "the model id is wrong: model_routing.{role}.model_id",
}


def main() -> int:
    parser = argparse.ArgumentParser(description="One call through the upstream channel.")
    parser.add_argument("--config", default=ROUTER_FILE, metavar="FILE", help=f"router file; default {ROUTER_FILE}")
    parser.add_argument("--model", choices=ROLES, help="which route; default: the first that the channel serves")
    arguments = parser.parse_args()
    try:
        gateway, role, route = _settings(Path(arguments.config), arguments.model)
    except ArealError as error:
        return _say(CONFIG, str(error))
    print(f"{role}: {route.model_id} at {openai_base(gateway.base_url)}", file=sys.stderr)
    return _ask(gateway, Route(role, route, route.timeout or gateway.timeout, (role,)))


def _settings(path: Path, role: str | None) -> tuple[ApiGatewayConfig, str, ModelRoute]:
    """Raises ConfigError."""
    if not path.exists() and str(path) == ROUTER_FILE:
        path = Path(__file__).resolve().parents[1] / ROUTER_FILE
    config = load_config(path)
    gateway, routing = config.api_gateway, config.model_routing or ModelRoutingConfig()
    if gateway is None:
        raise _missing(path, "api_gateway")
    protect(gateway.api_key)
    served = [
        each for each in ROLES if (found := getattr(routing, each)) and (each != "policy_model" or found.upstream)
    ]
    role = role or next(iter(served), "policy_model")
    route = getattr(routing, role)
    if route is None:
        raise _missing(path, f"model_routing.{role}")
    wrong = [line for line in placeholders(config) if line.startswith(("api_gateway.", f"model_routing.{role}."))]
    if wrong:
        raise ArealError("\n".join(wrong))
    proxy_for(openai_base(gateway.base_url), os.environ)
    check_key(gateway.api_key)
    return gateway, role, route


def _missing(path: Path, section: str) -> ArealError:
    return ArealError(f"{path} has no {section}; see {ROUTER_FILE} for what belongs there")


def _ask(gateway: ApiGatewayConfig, route: Route) -> int:
    base_url = openai_base(gateway.base_url)
    # The gateway's proxy, and no redirect followed, or this would say yes where the gateway cannot.
    http = openai.DefaultHttpxClient(proxy=proxy_for(base_url, os.environ), trust_env=False, follow_redirects=False)
    client = openai.OpenAI(
        base_url=base_url, api_key=gateway.api_key, max_retries=0, timeout=route.timeout_s, http_client=http
    )
    try:
        with client:
            answered = client.chat.completions.with_raw_response.create(
                model=route.model_id, messages=[{"role": "user", "content": "回复两个字：通了"}], max_tokens=16
            ).http_response
    except openai.APITimeoutError:
        return _say(
            FAILED,
            f"the channel answered nothing within {route.timeout_s:g} s; try again, or raise api_gateway.timeout",
        )
    except openai.APIConnectionError as error:
        return _say(
            BASE_URL,
            f"{base_url} is not reachable ({error.__cause__}); check the address, and the proxy variables",
            route,
        )
    except openai.APIStatusError as error:
        answered = error.response
    try:
        answer = read_answer(route, answered.status_code, answered.headers, answered.content)
    except UpstreamError as error:
        part = BASE_URL if answered.is_redirect else _at_fault(error.status, answered.text)
        return _say(part, f"{error}\nthe channel's answer: {_shown(answered.text)}", route)
    print(answer["choices"][0]["message"].get("content"))
    return 0


def _at_fault(status: int, body: str) -> int:
    """Which of the three is wrong, as far as the channel's answer says it."""
    if status in (401, 403):
        return KEY
    if status in (400, 404, 422) and "model" in body.lower():
        return MODEL_ID
    if status == 404 or body.lstrip().startswith("<"):
        return BASE_URL
    return FAILED


def _shown(body: str) -> str:
    said = redact(body)  # before it is cut: half a key is not known as one
    return said if len(said) <= 2000 else f"{said[:2000]}… ({len(body)} characters)"


def _say(code: int, text: str, route: Route | None = None) -> int:
    part = PARTS[code].format(role=route.role) + "\n" if route is not None and code in PARTS else ""
    print(redact(f"error: {part}{text}"), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
