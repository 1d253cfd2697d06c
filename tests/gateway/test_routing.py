"""Who may call what, which worker gets it, and how a refusal looks in each protocol."""

from __future__ import annotations

import asyncio
import base64
import json

import orjson
import pytest

from areal.base.errors import StoreError
from areal.base.guide import situation
from areal.base.types import SessionRequest, WorkerInfo
from areal.gateway.paths import find_route
from areal.gateway.routing import LONG_SILENCE_S, Directory
from areal.store import open_store, store_url
from areal.web.auth import SessionKeys, key_hash

READING_AGE_S = 0.25  # a little more than the test gateway lets a reading of the registry grow old
CHAT = "/v1/chat/completions"
PREFIXES = ("", "/v1", "/v1/v1", "/gateway", "/gateway/v1", "/gateway/v1/v1")


@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_route_is_found_under_every_prefix(prefix):
    for path, upstream in {
        "/chat/completions": "/v1/chat/completions",
        "/responses": "/v1/responses",
        "/messages": "/v1/messages",
        "/messages/count_tokens": "/v1/messages/count_tokens",
        "/rl/start_session": "/rl/start_session",
        "/rl/set_reward": "/rl/set_reward",
        "/rl/end_session": "/rl/end_session",
        "/rl/session": "/rl/session",
        "/rl/export_trajectories": "/rl/export_trajectories",
        "/export_trajectories": "/rl/export_trajectories",
    }.items():
        for spelling in (prefix + path, f"{prefix}{path}/", f"{prefix}//{path}"):
            route = find_route(spelling)
            assert route is not None, spelling
            assert route.upstream == upstream
    for path, name in {"/health": "health", "/api/hello": "hello", "": "root"}.items():
        assert find_route(prefix + path).name == name
    assert find_route(prefix + "/nothing") is None


async def test_the_query_string_passes_and_the_path_becomes_canonical(place, http):
    for url in ("/v1/messages?beta=true", "/gateway/v1/v1/messages?beta=true", "/messages?beta=true"):
        async with http.post(place.url + url, data=b"{}", headers={"x-api-key": place.key()}) as response:
            assert (await response.json())["path"] == "/v1/messages?beta=true"


async def test_the_key_says_the_worker(place, http):
    await place.add_worker("w1")
    for name in ("w0", "w1", "w0"):
        async with http.post(place.url + CHAT, data=b"{}", headers=place.headers(place.key(name))) as response:
            assert (await response.json())["headers"]["host"] == place.workers[name].url.removeprefix("http://")


async def test_a_model_only_key_reaches_its_worker_on_model_routes_through_any_gateway(place, http):
    w1, keys = await place.add_worker("w1"), SessionKeys.load(place.folder)  # as another process reads them
    headers = place.headers(keys.model_key(keys.check(place.key("w1"))))
    async with place.gateway() as other:
        for url in (place.url, other):
            for path in (CHAT, "/v1/responses", "/gateway/v1/v1/messages", "/v1/messages/count_tokens"):
                async with http.post(url + path, data=b"{}", headers=headers) as response:
                    assert response.status == 200, path
            for path in (
                "set_reward",
                "end_session",
                "session",
                "start_session",
                "exclude_session",
                "export_trajectories",
            ):
                async with http.post(f"{url}/rl/{path}", data=b"{}", headers=headers) as response:
                    assert response.status == 403, path
    assert len(w1.calls) == 8
    assert not place.workers["w0"].calls


async def test_T109_how_a_key_may_be_sent(place, http):
    key = place.key()
    for headers in (
        {"authorization": f"Bearer {key}"},
        {"authorization": f"bearer {key}"},
        {"x-api-key": key},
        {"authorization": f"Bearer {key}", "x-api-key": key},
        {"authorization": "Bearer something-else", "x-api-key": key},
    ):
        async with http.post(place.url + CHAT, data=b"{}", headers=headers) as response:
            assert response.status == 200, headers


def _foreign() -> str:
    return SessionKeys(b"another service's signing secret!!").mint("w0")


async def test_T109_no_wrong_or_forged_key_gets_through(place, http, admin):
    good = place.key()
    head, secret, mac = good.split(".")
    flipped = ("A" if mac[0] != "A" else "B") + mac[1:]
    cases = [
        {},
        {"authorization": "Bearer "},
        {"authorization": "Bearer"},
        {"authorization": good},
        {"authorization": "Basic " + base64.b64encode(good.encode()).decode()},
        {"x-api-key": ""},
        {"x-api-key": "sk-sess-WRONG123"},
        {"x-api-key": f"{head}.{secret}.{flipped}"},
        {"x-api-key": f"sk-sess-w1.{secret}.{mac}"},
        {"x-api-key": _foreign()},
        admin,
    ]
    for headers in cases:
        for path in (CHAT, "/v1/messages", "/v1/responses", "/rl/end_session"):
            async with http.post(place.url + path, data=b"{}", headers=headers) as response:
                assert response.status == 401, (headers, path)
                assert response.headers["x-should-retry"] == "false"
                body = await response.json()
            if path == "/v1/messages":
                assert body["type"] == "error"
                assert body["error"]["type"] == "authentication_error"
                assert body["request_id"] == response.headers["request-id"]
            else:
                assert body["error"]["code"] == "invalid_api_key"
            assert body["error"]["message"].startswith("Invalid API key")
            assert "WRONG123" not in json.dumps(body)
            assert secret not in json.dumps(body)
    assert not place.workers["w0"].calls


async def test_T109_admin_routes_take_the_admin_key_alone(place, http, admin):
    for path in ("/rl/start_session", "/rl/exclude_session", "/rl/export_trajectories", "/export_trajectories"):
        for headers, status in (({}, 401), ({"x-api-key": "nope"}, 401), (place.headers(), 403), (admin, 200)):
            async with http.post(place.url + path, data=b"{}", headers=headers) as response:
                assert response.status == status, (path, headers)
                if status != 200:
                    said = (await response.json())["error"]["message"]
                    assert "rollout.agent.admin_api_key" in said
                    assert situation("forbidden").said_in(said) == (status == 403)


async def test_bodies_that_nest_too_deep_are_the_callers_fault(place, http, admin):
    deep = b'{"a":' * 5000 + b"1" + b"}" * 5000
    for path in ("/rl/start_session", "/control/attach", "/control/challenge"):
        async with http.post(place.url + path, data=deep, headers=admin) as response:
            assert response.status == 400, path
            assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_an_unknown_path_and_a_wrong_method_are_json_too(place, http):
    async with http.post(place.url + "/v1/embeddings", data=b"{}") as response:
        assert response.status == 404
        assert (await response.json())["error"]["type"] == "not_found_error"
    async with http.get(place.url + CHAT) as response:
        assert response.status == 405
        assert "POST" in (await response.json())["error"]["message"]
    async with http.post(place.url + "/v1/messages/batches", data=b"{}") as response:
        assert response.status == 404
        assert (await response.json())["type"] == "error"


async def test_a_new_session_goes_to_the_worker_with_the_fewest(place, http, admin):
    await place.add_worker("w1")
    for number in range(3):  # sessions that the registry already counts
        await place.store.sessions.begin(SessionRequest(f"t{number}", key_hash(f"k{number}"), "w0"))
    await asyncio.sleep(READING_AGE_S)  # the gateway's reading grows old
    started = []
    for _ in range(3):
        async with http.post(place.url + "/rl/start_session", data=b'{"task_id": "t"}', headers=admin) as response:
            started.append((await response.json())["headers"]["host"])
    assert set(started) == {place.workers["w1"].url.removeprefix("http://")}


async def test_a_burst_of_sessions_spreads_before_the_registry_knows_of_any(run, http, admin):
    for name in ("w0", "w1", "w2"):
        await run.add_worker(name)

    async def start(url: str) -> None:
        async with http.post(url + "/rl/start_session", data=b'{"task_id": "t"}', headers=admin) as response:
            assert response.status == 200

    async with run.gateway(reading_age_s=3600.0) as url:  # however slow the burst is, it comes within one reading
        await asyncio.gather(*(start(url) for _ in range(30)))
    assert [len(run.workers[name].calls) for name in ("w0", "w1", "w2")] == [10, 10, 10]


async def test_a_refresh_goes_to_the_worker_of_its_key(place, http, admin):
    await place.add_worker("w1")
    await asyncio.sleep(READING_AGE_S)
    for name in ("w0", "w1", "w1"):
        body = orjson.dumps({"task_id": "t", "api_key": place.key(name)})
        async with http.post(place.url + "/rl/start_session", data=body, headers=admin) as response:
            assert (await response.json())["headers"]["host"] == place.workers[name].url.removeprefix("http://")
            assert (await response.json())["body"].encode() == body
    for body, status in (
        ({"task_id": "t", "api_key": _foreign()}, 401),
        ({"task_id": "t", "api_key": 5}, 400),
        ([], 400),
    ):
        async with http.post(place.url + "/rl/start_session", json=body, headers=admin) as response:
            assert response.status == status, body


@pytest.mark.parametrize("path", ["/rl/start_session", "/rl/export_trajectories", "/rl/exclude_session"])
async def test_workers_that_refuse_are_passed_over_where_any_will_do(place, http, admin, path):
    for name in ("w1", "w2"):
        await place.add_worker(name)
    await asyncio.sleep(READING_AGE_S)
    for name in ("w0", "w1"):
        await place.workers[name].stop()  # killed: its last heartbeat is still young
    body = b'{"task_id": "t", "session_id": "t"}'
    for _ in range(4):
        async with http.post(place.url + path, data=body, headers=admin) as response:
            assert response.status == 200
            assert (await response.json())["headers"]["host"] == place.workers["w2"].url.removeprefix("http://")
            assert (await response.json())["body"].encode() == body
    await place.workers["w2"].stop()
    async with http.post(place.url + path, data=body, headers=admin) as response:
        assert response.status == 502
        assert "check that the service runs" in (await response.json())["error"]["message"]


async def test_T047_502_while_the_worker_is_down_then_200_where_it_lives_now(place, http):
    key, worker = place.key(), place.workers["w0"]
    await worker.stop()
    async with http.post(place.url + CHAT, data=b"{}", headers=place.headers(key)) as response:
        assert response.status == 502
        assert 1 <= int(response.headers["retry-after"]) <= 30
        assert "check that the service runs" in (await response.json())["error"]["message"]
    async with http.post(place.url + "/v1/messages", data=b"{}", headers=place.headers(key)) as response:
        assert response.status == 502
        assert (await response.json())["error"]["type"] == "api_error"
    await worker.start()  # elsewhere: another port, the same logical id
    await place.heartbeat(worker)
    async with http.post(place.url + CHAT, data=b"{}", headers=place.headers(key)) as response:
        assert response.status == 200  # at once, although the gateway's reading of the registry is still young


async def test_T047_a_worker_that_the_registry_does_not_have_is_502(place, http):
    async with http.post(place.url + CHAT, data=b"{}", headers=place.headers(place.key("w7"))) as response:
        assert response.status == 502
        assert "w7" in (await response.json())["error"]["message"]
    await place.store.registry.leave("w0")
    await asyncio.sleep(READING_AGE_S)
    async with http.post(place.url + CHAT, data=b"{}", headers=place.headers()) as response:
        assert response.status == 502


async def test_health_counts_live_workers_and_takes_any_key(place, http):
    await place.add_worker("w1")
    await asyncio.sleep(READING_AGE_S)
    for headers in ({}, {"authorization": "Bearer whatever"}):
        async with http.get(place.url + "/health", headers=headers) as response:
            facts = await response.json()
            assert (response.status, facts["status"], facts["workers"]) == (200, "ok", 2)
            assert facts["run_id"] == "exp/trial"


async def test_what_clients_probe_for(place, http, admin):
    for path in ("/", "/v1", "/gateway/v1", "/api/hello", "/v1/api/hello"):
        async with http.head(place.url + path) as response:
            assert response.status == 200
            assert await response.read() == b""
    for headers in (place.headers(), admin):
        for path in ("/v1/models", "/models", "/gateway/v1/models"):
            async with http.get(place.url + path, headers=headers) as response:
                assert (await response.json())["path"] == "/v1/models"
        async with http.get(place.url + "/v1/models/Qwen/Qwen3%200.6B", headers=headers) as response:
            assert (await response.json())["path"] == "/v1/models/Qwen/Qwen3%200.6B"
    async with http.get(place.url + "/v1/models") as response:
        assert response.status == 401


async def test_metrics_count_requests_by_route_and_status(place, http):
    for headers in (place.headers(), {}):
        async with http.post(place.url + CHAT, data=b"{}", headers=headers) as response:
            await response.read()
    async with http.get(place.url + "/metrics") as response:
        text = await response.text()
    assert 'areal_gateway_requests_total{route="chat",status="200"} 1.0' in text
    assert 'areal_gateway_requests_total{route="chat",status="401"} 1.0' in text


async def test_pages_and_names_of_other_sites_are_refused_on_loopback(place, http):
    port = place.url.rpartition(":")[2]
    for headers, status in (
        ({"host": f"evil.example:{port}"}, 403),
        ({"host": "[bad"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"host": f"localhost:{port}"}, 200),
        ({"host": f"[::1]:{port}", "origin": "http://localhost:3000"}, 200),
    ):
        for method, path in (("GET", "/health"), ("POST", CHAT)):
            async with http.request(method, place.url + path, headers=place.headers() | headers) as response:
                assert response.status == status, headers


async def test_the_last_reading_serves_while_the_store_cannot_be_read(run, http):
    await run.add_worker("w0")
    files = sorted(run.folder.glob("store.sqlite*"))
    whole = [file.read_bytes() for file in files]

    def fill(contents: list[bytes]) -> None:
        for file, content in zip(files, contents, strict=True):
            with file.open("r+b") as opened:
                opened.write(content)

    fresh, used = (Directory(run.store.registry, reading_age_s=0.0) for _ in range(2))
    await used.live()
    fill([b"\xff" * len(content) for content in whole])
    try:
        assert (await used.find("w0")).url == run.workers["w0"].url
        with pytest.raises(StoreError):
            await fresh.live()
    finally:
        fill(whole)
    assert (await fresh.find("w0")).url == run.workers["w0"].url


async def test_while_no_heartbeat_can_be_written_those_that_were_there_are_asked(tmp_path):
    now = [1000.0]
    async with await open_store(store_url(tmp_path / "store.sqlite"), clock=lambda: now[0]) as store:
        directory = Directory(store.registry, reading_age_s=0.0)
        for name in ("w0", "w1"):
            await store.registry.heartbeat(WorkerInfo(name, f"http://127.0.0.1/{name}", 1, "host", 0.0))
        now[0] += 60
        assert [one.id for one in await directory.live(anew=True)] == ["w0", "w1"]
        await store.registry.heartbeat(WorkerInfo("w1", "http://127.0.0.1/w1", 1, "host", 0.0))
        assert [one.id for one in await directory.live(anew=True)] == ["w1"], "one is fresh, so the other is gone"
        now[0] += 2 * LONG_SILENCE_S
        assert await directory.live(anew=True) == ()
