"""Sessions through everything that may happen to the processes between agent and model, each of them a real one.

Two gateways and two workers stand side by side in front of a scripted model; tests stop, kill and restart them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests
from anthropic import Anthropic
from openai import InternalServerError, OpenAI

from areal.base.types import Interaction, Session
from areal.web.auth import SessionKeys
from tests.examples.service import run
from tests.faults.service import ADMIN, Service, until
from tests.faults.target import READY, wait_for

SCRIPT = [
    {"when": "slowly", "pieces": [f"w{n} " for n in range(30)] + ["<|im_end|>"], "delay_ms": 50},
    {"when": "endless", "pieces": [f"e{n} " for n in range(5000)], "delay_ms": 20},
    {"pieces": ["It", " is", " so.", "<|im_end|>"]},
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("service"), SCRIPT) as started:
        started.start("w0", "w1", "g0", "g1")
        yield started


class Client:
    """An agent, and whoever starts and rewards its sessions, at one gateway."""

    def __init__(self, service: Service, gateway: str = "g0") -> None:
        self.service, self.url = service, service.url(gateway)

    def post(self, path: str, body: dict[str, Any], key: str = ADMIN) -> requests.Response:
        return requests.post(self.url + path, json=body, headers={"x-api-key": key}, timeout=90)

    def start(self, task_id: str, api_key: str | None = None) -> dict[str, str]:
        answer = self.post("/rl/start_session", {"task_id": task_id, "api_key": api_key})
        assert answer.status_code == 200, answer.text
        started: dict[str, str] = answer.json()
        return started

    def start_at(self, worker: str, task_id: str) -> dict[str, str]:
        """Whatever the gateway prefers now: sessions that land elsewhere end again."""
        while not (started := self.start(task_id))["api_key"].startswith(f"sk-sess-{worker}."):
            self.post("/rl/end_session", {}, started["api_key"])
        return started

    def sdk(self, key: str, **more: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, timeout=90, **{"max_retries": 0, **more})

    def chat(self, key: str, *texts: str) -> Any:
        with self.sdk(key) as sdk:
            return sdk.chat.completions.create(model="default", messages=said(*texts))


def said(*texts: str) -> Any:
    return [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(texts)]


def session_of(service: Service, session_id: str) -> tuple[Session, tuple[Interaction, ...]]:
    async def read(store: Any) -> Any:
        return await store.sessions.get(session_id), await store.sessions.interactions(session_id)

    found: tuple[Session, tuple[Interaction, ...]] = service.read(read)
    return found


def at_once(*work: Callable[[], Any]) -> list[Any]:
    """All of them at the same moment, as nearly as threads can."""
    start = threading.Barrier(len(work))

    def meet(one: Callable[[], Any]) -> Any:
        start.wait()
        return one()

    with ThreadPoolExecutor(len(work)) as pool:
        return list(pool.map(meet, work))


def test_ids_of_one_task_get_suffixes_whoever_asks(service: Service) -> None:
    clients = [Client(service, gateway) for gateway in ("g0", "g1")] * 4
    started = at_once(*(lambda client=client: client.start("one task") for client in clients))
    names = {one["session_id"] for one in started}
    assert names == {"one task", *(f"one task-{k}" for k in range(1, 8))}
    assert len({one["api_key"] for one in started}) == 8
    for one in started:
        assert clients[0].post("/rl/end_session", {}, one["api_key"]).json()["session_id"] == one["session_id"]


def test_any_gateway_takes_any_key_of_the_run_and_none_of_another(service: Service) -> None:
    ours, theirs = Client(service, "g0"), Client(service, "g1")
    for worker in ("w0", "w1"):
        started = ours.start_at(worker, f"signed-{worker}")
        key = started["api_key"]
        first = ours.chat(key, "2+2?")
        theirs.chat(key, "2+2?", first.choices[0].message.content, "sure?")
        assert theirs.post("/rl/set_reward", {"reward": 1.0}, key).status_code == 200
        assert theirs.post("/rl/end_session", {}, key).json()["interaction_count"] == 2
        _, recorded = session_of(service, started["session_id"])
        assert recorded[1].token_parent == recorded[0].id == first.id
        head, secret, mac = key.split(".")
        other = "w1" if worker == "w0" else "w0"
        for forged in (
            f"sk-sess-{other}.{secret}.{mac}",
            f"{head}.{secret[::-1]}.{mac}",
            SessionKeys(b"x" * 32).mint("w0"),
        ):
            for client in (ours, theirs):
                answer = client.post("/v1/chat/completions", {"messages": said("2+2?")}, forged)
                assert answer.status_code == 401
                assert answer.json()["error"]["message"].startswith("Invalid API key")


def test_a_gateway_that_is_started_beside_another_serves_the_same_run(service: Service) -> None:
    started = Client(service).start("beside")
    log_dir = service.folder / "beside"
    command = [sys.executable, "-m", "areal.gateway.server", "--port", "0", "--log-dir", str(log_dir)]
    beside = subprocess.Popen([*command, "--beside", str(service.ports["g0"])], env=service.environment)
    try:
        until(lambda: "Gateway ready at" in (log_dir / "gateway.log").read_text() if log_dir.exists() else False)
        url = (log_dir / "gateway.log").read_text().split("Gateway ready at ")[1].split()[0]
        with OpenAI(base_url=f"{url}/v1", api_key=started["api_key"], max_retries=0) as sdk:
            sdk.chat.completions.create(model="default", messages=said("2+2?"))
        ended = requests.post(f"{url}/rl/end_session", json={}, headers={"x-api-key": started["api_key"]}, timeout=60)
        assert ended.json()["interaction_count"] == 1
    finally:
        beside.terminate()
        assert beside.wait(timeout=60) == 0
    wrong = subprocess.run([*command, "--beside", "1"], env=service.environment, capture_output=True, text=True)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: --beside 1: no gateway of this user serves a run on that port")
    assert len(wrong.stderr.splitlines()) == 1


def test_T048_refreshes_through_two_gateways_race_and_no_call_is_lost(service: Service) -> None:
    ours, theirs = Client(service, "g0"), Client(service, "g1")
    started = ours.start("refreshed")
    key = started["api_key"]
    answered = [ours.chat(key, "before").id]
    won = 0
    body = {"task_id": "refreshed", "api_key": key}
    for turn in range(3):
        refreshes = [partial(client.post, "/rl/start_session", body) for client in (ours, theirs, ours)]
        chats = [partial(client.chat, key, f"call {turn}.{k}") for k, client in enumerate((ours, theirs, ours, theirs))]
        results = at_once(*refreshes, *chats)
        statuses = Counter(answer.status_code for answer in results[:3])
        assert statuses[200] >= 1
        assert statuses[200] + statuses[409] == 3
        assert all(a.headers["x-should-retry"] == "false" for a in results[:3] if a.status_code == 409)
        won += statuses[200]
        answered += [answer.id for answer in results[3:]]
    sessions = [session_of(service, f"refreshed-{k}" if k else "refreshed") for k in range(won + 1)]
    assert [session.ending for session, _ in sessions] == ["refreshed"] * won + [None]
    recorded = [one.id for _, interactions in sessions for one in interactions]
    assert sorted(recorded) == sorted(answered)  # each exactly once, in one session or the other
    assert ours.post("/rl/end_session", {}, key).json()["session_id"] == sessions[-1][0].id


def test_calls_at_once_in_one_session_in_every_protocol(service: Service) -> None:
    ours, theirs = Client(service, "g0"), Client(service, "g1")
    started = ours.start("many at once")
    key = started["api_key"]

    def chat(client: Client, k: int) -> str:
        with client.sdk(key) as sdk:
            chunks = list(sdk.chat.completions.create(model="default", messages=said(f"{k} slowly"), stream=True))
        return chunks[0].id

    def responses(client: Client, k: int) -> str:
        with client.sdk(key) as sdk, sdk.responses.stream(model="default", input=f"{k} slowly") as stream:
            return stream.until_done().get_final_response().id

    def messages(client: Client, k: int) -> str:
        with Anthropic(base_url=client.url, api_key=key, timeout=90, max_retries=0) as sdk:
            with sdk.messages.stream(model="default", max_tokens=99, messages=said(f"{k} slowly")) as stream:
                return stream.get_final_message().id

    work = [
        lambda ask=ask, client=client, k=k: ask(client, k)
        for k, (ask, client) in enumerate(
            (ask, client) for ask in (chat, responses, messages) for client in (ours, theirs) * 2
        )
    ]
    ids = at_once(*work)
    assert ours.post("/rl/end_session", {}, key).json()["interaction_count"] == len(work)
    _, recorded = session_of(service, started["session_id"])
    assert sorted(one.id for one in recorded) == sorted(ids)
    assert sorted(one.index for one in recorded) == list(range(len(work)))
    texts = {one.messages[0].content: one for one in recorded}
    assert texts.keys() == {f"{k} slowly" for k in range(len(work))}
    assert {len(one.completion.token_ids) for one in recorded} == {31}
    assert all(not one.tags for one in recorded)


def test_a_gateway_drains_its_streams_and_is_back_before_the_next_request(service: Service) -> None:
    client = Client(service, "g1")
    started = client.start("restarted gateway")
    with client.sdk(started["api_key"], max_retries=2) as sdk:  # one connection pool, as an agent has it
        stream = sdk.chat.completions.create(model="default", messages=said("go slowly"), stream=True)
        first = next(stream)
        service.terminate("g1")
        text = "".join(chunk.choices[0].delta.content or "" for chunk in (first, *stream) if chunk.choices)
        assert text == "".join(f"w{n} " for n in range(30))  # to its end, although the gateway was told to stop
        assert service.ended("g1") == 0
        service.start("g1")
        assert service.url("g1") == client.url
        sdk.chat.completions.create(model="default", messages=said("go slowly", text, "and?"))
        service.kill("g1")  # without a word
        service.start("g1")
        sdk.chat.completions.create(model="default", messages=said("go slowly", text, "and then?"))
    assert client.post("/rl/end_session", {}, started["api_key"]).json()["interaction_count"] == 3
    _, recorded = session_of(service, started["session_id"])
    assert [one.token_parent for one in recorded] == [None, recorded[0].id, recorded[0].id]


def test_T047_a_killed_worker_is_a_clear_502_and_then_its_sessions_go_on_under_their_keys(service: Service) -> None:
    client = Client(service)
    started, other = client.start_at("w0", "killed worker"), client.start_at("w1", "its neighbour")
    key = started["api_key"]
    first = client.chat(key, "2+2?").choices[0].message.content
    body = {"messages": said("endless"), "stream": True}
    answer = requests.post(
        f"{client.url}/v1/chat/completions", json=body, headers={"x-api-key": key}, stream=True, timeout=90
    )
    pieces = answer.iter_content(None)
    text = next(pieces)
    service.kill("w0")
    try:
        text += b"".join(pieces)
        assert b'"error"' in text  # said in the stream
    except requests.exceptions.ChunkedEncodingError:
        pass  # or, in the middle of an event, by breaking off
    assert b"[DONE]" not in text  # never as if it had ended well
    with client.sdk(key) as sdk:
        with pytest.raises(InternalServerError, match="check that the service runs") as refused:
            sdk.chat.completions.create(model="default", messages=said("2+2?", first, "sure?"))
    assert refused.value.status_code == 502
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 30
    client.chat(other["api_key"], "still there?")  # its neighbour serves on, and takes the new sessions
    assert client.start("new")["api_key"].startswith("sk-sess-w1.")
    service.start("w0")
    again = client.chat(key, "2+2?", first, "sure?")
    assert client.post("/rl/set_reward", {"reward": 1.0, "interaction_id": again.id}, key).status_code == 200
    assert client.post("/rl/end_session", {}, key).json()["interaction_count"] == 2
    _, recorded = session_of(service, started["session_id"])
    assert recorded[1].token_parent == recorded[0].id
    assert recorded[1].reward == 1.0


def test_a_worker_that_is_stopped_finishes_its_streams_and_its_sessions_go_on(service: Service) -> None:
    client = Client(service)
    started = client.start_at("w1", "stopped worker")
    key = started["api_key"]
    with client.sdk(key) as sdk:
        stream = sdk.chat.completions.create(model="default", messages=said("go slowly"), stream=True)
        first = next(stream)
        service.terminate("w1")
        text = "".join(chunk.choices[0].delta.content or "" for chunk in (first, *stream) if chunk.choices)
    assert text.split()[-1] == "w29"
    assert service.ended("w1") == 0
    assert client.start("meanwhile")["api_key"].startswith("sk-sess-w0.")
    service.start("w1")
    client.chat(key, "go slowly", text, "and?")
    _, recorded = session_of(service, started["session_id"])
    assert recorded[1].token_parent == recorded[0].id


def test_an_idle_session_is_exported_or_counted_also_when_its_worker_is_gone(tmp_path: Path) -> None:
    with Service(tmp_path, SCRIPT, agent={"session_timeout_seconds": 8}) as service:
        service.start("w0", "w1", "g0")
        client = Client(service)
        names = {worker: client.start_at(worker, f"of {worker}") for worker in ("w0", "w1")}
        silent = client.start_at("w0", "never rewarded")
        empty = client.start_at("w1", "never used")
        for started in (*names.values(), silent):
            client.chat(started["api_key"], "2+2?")
        for started in names.values():
            assert client.post("/rl/set_reward", {"reward": 0.5}, started["api_key"]).status_code == 200
        service.kill("w0")  # nobody but w1 is left to see that its sessions are idle

        until(lambda: service.read(lambda store: store.training.counts()).running_sessions == 0)
        assert session_of(service, empty["session_id"])[0].ending == "expired"
        for started in names.values():
            session, recorded = session_of(service, started["session_id"])
            assert (session.ending, recorded[0].reward) == ("expired", 0.5)
        groups = service.read(lambda store: store.training.ready())
        assert {group.task_id for group in groups} == {"of w0", "of w1"}  # exported to training like any other
        dropped = service.read(lambda store: store.reading.dropped_sessions())
        assert dropped == {"expired": 1, "empty": dropped["empty"]}  # reported, each with its reason
        assert dropped["empty"] >= 1
        assert (service.log("w0") + service.log("w1")).count("expired after") == 4
        export = {"session_id": silent["session_id"]}
        answer = client.post("/rl/export_trajectories", export)  # dropped from training, and still there to look at
        assert [len(row["token_ids"]) > 4 for row in answer.json()["trajectories"]] == [True]
        refused = client.post("/v1/chat/completions", {"messages": said("2+2?")}, names["w1"]["api_key"])
        assert refused.status_code == 401
        assert "idle for too long" in refused.json()["error"]["message"]
        assert service.read(lambda store: store.training.counts()).running == 0


def kill_worker(folder: Path) -> int:
    pid = json.loads((folder / "processes" / "worker-0.ready.json").read_text())["pid"]
    os.kill(pid, signal.SIGKILL)
    return int(pid)


def test_a_run_whose_worker_died_begins_again_by_itself_and_then_by_its_command_and_its_sessions_go_on(
    tmp_path: Path,
) -> None:
    with run(tmp_path, "own_agent/config.yaml", "recover.retries=1", script=SCRIPT) as first:
        started = requests.post(
            f"{first.url}/rl/start_session",
            json={"task_id": "long-lived"},
            headers={"x-api-key": "areal-admin-key"},
            timeout=60,
        ).json()
        with OpenAI(base_url=f"{first.url}/v1", api_key=started["api_key"]) as sdk:
            text = sdk.chat.completions.create(model="default", messages=said("2+2?")).choices[0].message.content
            kill_worker(first.folder)
            wait_for(lambda: (first.folder / "logs" / "train.log").read_text().count(READY) == 2, "its next life")
            sdk.chat.completions.create(model="default", messages=said("2+2?", text, "sure?"))  # where it was
        pid = kill_worker(first.folder)
        output, _ = first.process.communicate(timeout=120)
        assert first.process.returncode == 1
        assert f"worker-0 (pid {pid})" in output
    with run(tmp_path, "own_agent/config.yaml", script=SCRIPT) as again:
        with OpenAI(base_url=f"{again.url}/v1", api_key=started["api_key"]) as sdk:
            sdk.chat.completions.create(model="default", messages=said("2+2?", text, "sure?"))
        [(summary, recorded)] = again.sessions()
        assert summary.session.ending is None
        assert [one.token_parent for one in recorded] == [None, recorded[0].id, recorded[0].id]
        again.stop()
