"""What a key, a page of another site and a stranger cannot do, through the gateway and at a worker's own port, over real sockets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.target import ADMIN, TOKEN, Reply, Target, bearer

MODEL_ROUTES = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
COUNT_ROUTES = ("/v1/messages/count_tokens", "/v1/responses/input_tokens")


def asked(path: str, text: str = "hi", **more: Any) -> bytes:
    said: dict[str, Any] = {"input": text} if "responses" in path else {"messages": [{"role": "user", "content": text}]}
    return json.dumps({**said, **more}).encode()


@contextmanager
def running(folder: Path, **agent: Any) -> Iterator[Target]:
    with Target.running(folder, agent) as target:
        yield target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with running(tmp_path_factory.mktemp("security")) as one:
        yield one


def send(target: Target, path: str, body: Any, key: str, *more: tuple[str, str], url: str = "") -> Reply:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return target.judge(target.send("POST", path, data, [bearer(key), *more], url=url), (path, body))


def answered(target: Target, key: str, path: str = MODEL_ROUTES[0], **more: Any) -> str:
    reply = send(target, path, asked(path, **more), key)
    assert reply.status == 200
    return str(json.loads(reply.body)["id"])


@pytest.mark.parametrize("agent", [{"reward_key": "admin"}, {"reward_source": "judge_model"}])
def test_T109_a_session_key_cannot_reward_itself_where_something_else_rewards(
    tmp_path: Path, agent: dict[str, str]
) -> None:
    with running(tmp_path, **agent) as target:
        key = target.begin("mine")
        name = answered(target, key)
        session_hint = ("x-session-id", "hinted")
        send(target, MODEL_ROUTES[0], asked(MODEL_ROUTES[0]), TOKEN, session_hint)
        for body in (
            {"reward": 1.0},
            {"reward": 1.0, "interaction_id": name},
            {"reward": 1.0, "session_id": "mine"},
            {"reward": 1.0, "session_id": "other"},
        ):
            for url in ("", *target.worker_urls):
                reply = send(target, "/rl/set_reward", body, key, url=url)
                assert reply.status == 403, (body, reply)
                assert b"may not reward itself" in reply.body
            assert send(target, "/rl/set_reward", body, TOKEN, session_hint).status == 403
        assert send(target, "/rl/set_reward", {"reward": 0.5, "session_id": "mine"}, ADMIN).status == 200
        assert send(target, "/rl/end_session", {}, key).status == 200
        exported = json.loads(send(target, "/rl/export_trajectories", {"session_id": "mine"}, ADMIN).body)
        assert [one["reward"] for one in exported["interactions"]] == [0.5]


JUDGES = ("reward_model", "judge_model", "Reward-Model", "judge model", " reward_model ", "reward_modle", "JUDGE_MODEL")


@pytest.mark.parametrize("name", JUDGES)
def test_a_session_key_cannot_reach_the_judge_under_any_name(target: Target, name: str) -> None:
    calls = target.calls()
    for key, more in ((target.key, ()), (TOKEN, (("x-session-id", "judge"),))):
        for path in (*MODEL_ROUTES, *COUNT_ROUTES):
            for stream in (False, True):
                reply = send(target, path, asked(path, model=name, stream=stream), key, *more)
                assert reply.status == 404, (path, reply)
                assert b"_model" in reply.body
    quoted = name.replace(" ", "%20")
    assert target.send("GET", f"/v1/models/{quoted}", headers=[bearer(target.key)]).status == 404
    assert target.calls() == calls


def test_a_session_key_reads_and_changes_no_other_session(target: Target) -> None:
    theirs = target.begin("theirs")
    secret = answered(target, theirs, text="a secret of theirs")
    chained = answered(target, theirs, "/v1/responses", text="another secret")
    mine = target.begin("mine")
    answered(target, mine)
    for url in ("", *target.worker_urls):
        seen = send(target, "/rl/session", {"session_id": "theirs"}, mine, ("x-session-id", "theirs"), url=url)
        assert json.loads(seen.body)["session_id"] == "mine"
        for path in ("/rl/export_trajectories", "/export_trajectories", "/rl/exclude_session", "/rl/start_session"):
            body = {"session_id": "theirs", "task_id": "x", "api_key": theirs}
            assert send(target, path, body, mine, url=url).status == 403
        assert send(target, "/rl/set_reward", {"reward": 1.0, "interaction_id": secret}, mine, url=url).status == 404
        assert send(target, "/rl/set_reward", {"reward": 1.0, "session_id": "theirs"}, mine, url=url).status == 403
    for path, more in (
        ("/v1/responses", {"previous_response_id": chained}),
        ("/v1/responses", {"previous_response_id": secret}),
        ("/v1/responses/input_tokens", {"previous_response_id": chained}),
        ("/v1/messages", {"thread": {"type": "continue", "previous_message_id": secret}}),
        ("/v1/messages/count_tokens", {"thread": {"type": "continue", "previous_message_id": chained}}),
    ):
        reply = send(target, path, asked(path, **more), mine)
        assert reply.status == 404, (path, reply)
        assert b"secret" not in reply.body
    assert send(target, "/rl/end_session", {"session_id": "theirs"}, mine).status == 200
    still = json.loads(send(target, "/rl/session", {}, theirs).body)
    assert (still["session_id"], still["ending"], still["rewards_set"], still["interaction_count"]) == (
        "theirs",
        None,
        0,
        2,
    )


def test_T109_no_altered_foreign_or_ended_key_opens_anything(target: Target) -> None:
    key = target.begin("keys")
    worker, secret, mac = key.removeprefix("sk-sess-").split(".")
    other = "w1" if worker == "w0" else "w0"
    forged = [
        f"sk-sess-{other}.{secret}.{mac}", f"sk-sess-{worker}.{secret}x.{mac}", f"sk-sess-{worker}.{secret}.{mac[::-1]}", f"sk-sess-{worker}.{secret}.",
        key[:-1], key + "A", key.upper(), f"sk-sess-{worker}.{secret}", "sk-sess-..", "", "null", "undefined", "Bearer", "x" * 600,
    ]  # fmt: skip
    for wrong in forged:
        for path in (*MODEL_ROUTES, *COUNT_ROUTES, "/rl/set_reward", "/rl/end_session", "/rl/session"):
            reply = send(target, path, {"reward": 1.0, **json.loads(asked(path))}, wrong)
            assert reply.status == 401, (wrong, path, reply)
            said = json.loads(reply.body)["error"]["message"]
            assert said.startswith("Invalid API key")
            assert not wrong or len(wrong) < 6 or wrong not in said
        for path in ("/rl/start_session", "/rl/export_trajectories", "/rl/exclude_session"):
            assert send(target, path, {"task_id": "x", "session_id": "keys"}, wrong).status == 401
        assert target.send("GET", "/v1/models", headers=[bearer(wrong)]).status == 401
    assert send(target, "/rl/end_session", {}, key).status == 200
    for path in MODEL_ROUTES:
        assert send(target, path, asked(path), key).status == 401


FOREIGN_HOSTS = (
    "evil.example",
    "evil.example:8090",
    "127.0.0.1.evil.example",
    "localhost@evil.example",
    "10.0.0.1",
    "[2001:db8::1]:80",
    "",
)
FOREIGN_ORIGINS = (
    "https://evil.example",
    "http://127.0.0.1.evil.example",
    "null",
    "file://",
    "http://localhost.evil.example",
    "https://10.0.0.1",
)
ROUTES = (("GET", "/health"), ("GET", "/metrics"), ("GET", "/"), ("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("POST", "/rl/start_session"),
          ("POST", "/rl/session"), ("OPTIONS", "/v1/chat/completions"), ("POST", "/control/challenge"), ("GET", "/nothing"))  # fmt: skip


@pytest.mark.parametrize("host", FOREIGN_HOSTS)
def test_dns_rebinding_a_wrong_host_is_refused_on_every_route_of_every_port(target: Target, host: str) -> None:
    for url in ("", *target.worker_urls):
        for method, path in ROUTES:
            reply = target.send(method, path, headers=[bearer(target.key)], url=url, host=host)
            assert reply.status == 403, (url, method, path, reply)
        two = target.send("GET", "/health", headers=[("Host", host)], url=url)
        assert two.status in (400, 403)  # the right one beside it does not help


@pytest.mark.parametrize("origin", FOREIGN_ORIGINS)
def test_a_page_of_another_site_is_refused_on_every_route(target: Target, origin: str) -> None:
    for method, path in ROUTES:
        for key in (target.key, ADMIN, TOKEN):
            reply = target.send(method, path, headers=[bearer(key), ("Origin", origin)])
            assert reply.status == 403, (method, path, reply)
            assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]:1", "app.localhost:8090", "LOCALHOST"])
def test_this_machine_by_any_of_its_names_is_served(target: Target, host: str) -> None:
    for url in ("", *target.worker_urls):
        assert target.send("GET", "/health", url=url, host=host).status == 200
    body = asked(MODEL_ROUTES[0])
    headers = [bearer(target.begin("by its names")), ("Origin", f"http://{host}")]
    assert target.send("POST", MODEL_ROUTES[0], body, headers, host=host).status == 200


def test_T110_T111_no_route_takes_a_path_of_a_file(target: Target, tmp_path: Path) -> None:
    file = tmp_path / "secret.txt"
    file.write_text("the content of a file")
    key = target.begin(str(file))
    for path in MODEL_ROUTES:
        for more in (
            {"model": str(file)},
            {"chat_template": str(file)},
            {"chat_template_kwargs": {"chat_template": str(file)}},
            {"extra_body": {"chat_template": f"file://{file}"}},
        ):
            reply = send(target, path, asked(path, **more), key)
            assert reply.status in (200, 400)
            assert b"the content of a file" not in reply.body
        parts = [{"type": "image_url", "image_url": {"url": f"file://{file}"}}]
        sent = {"messages": [{"role": "user", "content": parts}], "input": [{"role": "user", "content": parts}]}
        assert send(target, path, sent, key).status == 400
    for path in (f"/..{file}", f"/v1/..%2f..{file}", f"/v1/models/..%2f..%2f..{file}", f"/page/..{file}"):
        reply = target.send("GET", path, headers=[bearer(key)])
        assert b"the content of a file" not in reply.body
