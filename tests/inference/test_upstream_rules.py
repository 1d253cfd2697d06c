"""The channel's pure rules: addresses, keys, proxies, names and defaults of routes, limits under a clock of the test's own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from areal.base.errors import ConfigError, UpstreamError, UpstreamLimit
from areal.config.base_url import endpoint, openai_base
from areal.config.upstream import ApiGatewayConfig, ModelRoute, ModelRoutingConfig
from areal.inference.upstream.client import Channel
from areal.inference.upstream.limits import RouteLimits
from areal.inference.upstream.names import nearly_upstream
from areal.inference.upstream.proxies import proxy_for
from areal.inference.upstream.routes import routes_of, upstream_names

GATEWAY = ApiGatewayConfig(base_url="http://h/api", api_key="sk-a-key-of-a-channel")


@pytest.mark.parametrize(
    "spelling",
    [
        "http://h/api",
        "http://h/api/",
        "http://h/api/v1",
        "http://h/api/v1/",
        "http://h/api/v1/chat/completions",
        " http://h//api//v1// ",
        "http://h/api/chat/completions/",
    ],
)
def test_T101_every_spelling_of_a_base_url_is_one_path(spelling: str) -> None:
    assert endpoint(spelling) == "http://h/api/v1/chat/completions"
    assert openai_base(spelling) == "http://h/api/v1"


@pytest.mark.parametrize(
    ("base_url", "path"),
    [
        ("https://h", "https://h/v1/chat/completions"),
        ("https://h:8443/v1", "https://h:8443/v1/chat/completions"),
        ("https://h/api/paas/v4", "https://h/api/paas/v4/chat/completions"),
        ("https://h/v1beta/openai/", "https://h/v1beta/openai/chat/completions"),
        ("https://h/API/V1", "https://h/API/V1/chat/completions"),
        ("https://h/v1.1/", "https://h/v1.1/chat/completions"),
        ("http://[::1]:9/api", "http://[::1]:9/api/v1/chat/completions"),
    ],
)
def test_T101_a_version_of_ones_own_stays_the_only_one(base_url: str, path: str) -> None:
    assert endpoint(base_url) == path


@pytest.mark.parametrize(
    "base_url",
    [
        "h/api",
        "ftp://h",
        "http://",
        "http://h/v1/v1",
        "http://h/v1?key=sk-secret",
        "http://u:p@h",
        "http://h:x/",
        "sk-secret-4711-4712",
        "ftp://me:sk-secret@h",
        "http://me:sk-secret@h:x/",
    ],
)
def test_T101_an_address_that_cannot_be_meant_is_refused_with_the_key_that_holds_it(base_url: str) -> None:
    with pytest.raises(ConfigError, match=r"api_gateway\.base_url") as refused:
        endpoint(base_url)
    assert "sk-secret" not in str(refused.value)


@pytest.mark.parametrize("key", ["sk-a\nbc", "sk-你的key", " ", "sk-a\x00"])
def test_T102_a_key_that_no_header_can_hold_is_a_config_error_without_its_value(key: str) -> None:
    with pytest.raises(ConfigError, match=r"api_gateway\.api_key") as refused:
        Channel(GATEWAY.model_copy(update={"api_key": key}), None)
    assert not key.strip() or key not in str(refused.value)


PROXIED = {"HTTPS_PROXY": "http://proxy:3128", "http_proxy": "proxy-for-http:8080"}


@pytest.mark.parametrize(
    ("url", "environment", "proxy"),
    [
        ("https://h/api", PROXIED, "http://proxy:3128"),
        ("http://h/api", PROXIED, "http://proxy-for-http:8080"),
        ("http://127.0.0.1:9/api", PROXIED, "http://proxy-for-http:8080"),  # nobody excepted it
        ("http://h", {"ALL_PROXY": "http://all:1", "HTTPS_PROXY": "http://proxy:3128"}, "http://all:1"),
        ("http://h", {"HTTP_PROXY": "http://upper:1", "http_proxy": "http://lower:1"}, "http://lower:1"),
        ("http://h", {"HTTP_PROXY": " "}, None),
        ("http://h", {}, None),
        *(
            ("https://api.h.example:8443/v1", PROXIED | {"NO_PROXY": listed}, None)
            for listed in ("*", "api.h.example", "h.example", ".h.example", "x, *.h.example", "h.example:8443")
        ),
        *(
            ("https://api.h.example:8443/v1", PROXIED | {"no_proxy": listed}, "http://proxy:3128")
            for listed in ("pi.h.example", "h.example:1", "10.0.0.0/8", "example.h", "")
        ),
        *(
            ("http://10.1.2.3:9", PROXIED | {"NO_PROXY": listed}, None)
            for listed in ("10.0.0.0/8", "10.1.2.3", "1.1.1.1,10.1.2.3/32")
        ),
        ("http://[fd00::1]:9", PROXIED | {"NO_PROXY": "fd00::/8"}, None),
        ("http://11.1.2.3:9", PROXIED | {"NO_PROXY": "10.0.0.0/8"}, "http://proxy-for-http:8080"),
    ],
)
def test_T103_the_channels_proxy_is_the_environments_with_its_exceptions(
    url: str, environment: dict[str, str], proxy: str | None
) -> None:
    assert proxy_for(url, environment) == proxy


@pytest.mark.parametrize(
    "proxy",
    [
        "socks5://me:hunter22@proxy:1080",
        "http://me:hunter22@proxy:99999",
        "me:hunter22@proxy:port",
        "http://me:hunter22@[::1",
        "http://me:hunter22@",
    ],
)
def test_T103_what_is_no_http_proxy_is_refused_without_its_password(proxy: str) -> None:
    with pytest.raises(ConfigError, match="no HTTP proxy") as refused:
        proxy_for("https://h", {"https_proxy": proxy})
    assert "hunter22" not in str(refused.value)


def routing(**routes: dict[str, Any]) -> ModelRoutingConfig:
    return ModelRoutingConfig.model_validate(
        {name: {"model_id": name.split("_")[0]} | route for name, route in routes.items()}
    )


def test_names_of_routes_are_role_and_model_id_and_the_policys_are_not_the_channels() -> None:
    every = routing(policy_model={}, reward_model={}, judge_model={"timeout": 300})
    found = routes_of(GATEWAY, every)
    assert [(route.names, route.timeout_s) for route in found] == [
        (("reward_model", "reward"), 120),
        (("judge_model", "judge"), 300),
    ]
    shared = routing(
        policy_model={"model_id": "one"}, reward_model={"model_id": "one"}, judge_model={"model_id": "two"}
    )
    assert upstream_names(GATEWAY, shared) == {"reward_model", "judge_model", "two"}
    twice = routing(reward_model={"model_id": "one"}, judge_model={"model_id": "one"}, policy_model={"upstream": True})
    assert [route.names for route in routes_of(GATEWAY, twice)] == [
        ("reward_model", "one"),
        ("judge_model",),
        ("policy_model", "policy"),
    ]
    assert (upstream_names(None, every), upstream_names(GATEWAY, None)) == (frozenset(), frozenset())


@pytest.mark.parametrize(
    "name", ["reward_modle", "Reward-Model", "judge model", "JUDGE_MODEL", "reward_model", "judgemodel"]
)
def test_a_near_miss_is_known(name: str) -> None:
    assert nearly_upstream(name) in ("reward_model", "judge_model")


@pytest.mark.parametrize("name", ["default", "smollm2-135m", "gpt-judge", "model", "policy_model"])
def test_other_names_are_no_near_miss(name: str) -> None:
    assert nearly_upstream(name) is None


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def limits(clock: Clock, gateway: dict[str, Any] | None = None, **route: Any) -> RouteLimits:
    config = ModelRoute.model_validate({"model_id": "judge"} | route)
    return RouteLimits("judge_model", config, GATEWAY.model_copy(update=gateway or {}), now=clock)


async def call(bounds: RouteLimits, status: int = 200, tokens: int = 0) -> None:
    async with bounds.calling() as spend:
        spend(tokens, 0)
        if status != 200:
            raise UpstreamError("no", status=status)


async def fails(bounds: RouteLimits, status: int) -> None:
    with pytest.raises(UpstreamError):
        await call(bounds, status)


async def test_a_dead_model_is_left_alone_and_tried_by_one_call_when_its_time_is_over() -> None:
    clock = Clock()
    bounds = limits(clock, {"breaker_failures": 3, "breaker_seconds": 30})
    for status in (500, 504, 200, 500, 502, 429, 500, 500, 503):  # in a row only the last three
        await (fails(bounds, status) if status != 200 else call(bounds))
    for left_s in (30, 10):
        with pytest.raises(UpstreamLimit, match="failed 3 times in a row") as refused:
            await call(bounds)
        assert (refused.value.status, refused.value.retry_after_s) == (503, left_s)
        clock.now += 20
    await fails(bounds, 500)  # the one that tries
    with pytest.raises(UpstreamLimit, match="failed 4 times in a row"):
        await call(bounds)
    clock.now += 31
    async with bounds.calling():
        with pytest.raises(UpstreamLimit):
            await call(bounds)  # one at a time
    await asyncio.gather(*(call(bounds) for _ in range(3)))


async def test_one_that_tries_and_is_called_off_says_nothing() -> None:
    clock = Clock()
    bounds = limits(clock, {"breaker_failures": 1, "breaker_seconds": 30})
    await fails(bounds, 500)
    clock.now += 31
    trying = bounds.calling()
    await trying.__aenter__()
    await trying.__aexit__(asyncio.CancelledError, asyncio.CancelledError(), None)
    await call(bounds)


async def test_zero_failures_never_break() -> None:
    bounds = limits(Clock(), {"breaker_failures": 0})
    for _ in range(20):
        await fails(bounds, 500)


async def test_a_budget_of_calls_is_of_any_minute() -> None:
    clock = Clock()
    bounds = limits(clock, calls_per_minute=2)
    await call(bounds)
    clock.now += 40
    await fails(bounds, 400)
    with pytest.raises(UpstreamLimit, match="2 calls of this minute") as refused:
        await call(bounds)
    assert (refused.value.status, refused.value.retry_after_s) == (429, 20)
    clock.now += 20
    await call(bounds)
    with pytest.raises(UpstreamLimit):
        await call(bounds)


async def test_a_call_that_waited_in_line_is_bounded_by_what_was_spent_meanwhile() -> None:
    bounds = limits(Clock(), concurrency=1, calls_per_minute=1)
    async with bounds.calling():
        waiting = asyncio.create_task(call(bounds))
        with pytest.raises(UpstreamLimit):  # its minute is spent already
            await waiting
    bounds = limits(Clock(), concurrency=1, budget_tokens=10)
    async with bounds.calling() as spend:
        waiting = asyncio.create_task(call(bounds))
        await asyncio.sleep(0)
        spend(10, 0)
    with pytest.raises(UpstreamLimit, match="10 tokens of its 10"):
        await waiting


async def test_a_budget_of_tokens_ends_and_no_client_should_try_again() -> None:
    bounds = limits(Clock(), budget_tokens=100)
    await call(bounds, tokens=99)
    await call(bounds, tokens=5)
    with pytest.raises(
        UpstreamLimit, match=r"104 tokens of its 100; raise model_routing\.judge_model\.budget_tokens"
    ) as refused:
        await call(bounds)
    assert (refused.value.status, refused.value.should_retry) == (429, False)


async def test_a_call_that_waited_in_line_for_a_model_that_died_meanwhile_is_not_made() -> None:
    bounds = limits(Clock(), {"breaker_failures": 1}, concurrency=1)
    dies = bounds.calling()
    await dies.__aenter__()
    waiting = asyncio.create_task(call(bounds))
    await asyncio.sleep(0)
    error = UpstreamError("no", status=500)
    assert not await dies.__aexit__(UpstreamError, error, None)
    with pytest.raises(UpstreamLimit, match="failed 1 times in a row"):
        await waiting
