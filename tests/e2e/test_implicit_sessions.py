"""Training from an agent that is configured once: a base URL, the internal token, and never a start_session."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import requests
from anthropic import Anthropic
from openai import OpenAI, PermissionDeniedError

from areal.base.metrics import read_metrics
from areal.base.types import Counts
from areal.store import open_store, store_url
from areal.store.base import SessionSummary
from tests.channel.stub import StubChannel, chat
from tests.e2e.running import service

TOKEN = "token-of-one-agent-4711"
IDLE_S = 8  # long beside the pauses between an agent's turns on a busy machine


class Agents:
    """Agents of several kinds, and the verifier that rewards what they did; all know the URL and the token only."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.openai = OpenAI(base_url=f"{url}/v1", api_key=TOKEN, timeout=120)

    def chat(self, *texts: str, **more: Any) -> Any:
        roles = ("user", "assistant")
        messages: list[Any] = [{"role": roles[k % 2], "content": text} for k, text in enumerate(texts)]
        return self.openai.chat.completions.create(model="default", messages=messages, max_tokens=6, **more)

    def rl(self, path: str, body: dict[str, Any], **headers: str) -> requests.Response:
        return requests.post(f"{self.url}/rl/{path}", json=body, headers={"x-api-key": TOKEN, **headers}, timeout=60)

    def to_the_last_turn(self) -> None:
        """Named by the client's header, three turns; the last one ends it, and its reward comes within the grace."""
        name = {"x-session-id": "personal"}
        first = self.chat("2+2?", extra_headers=name)
        assert self.rl("set_reward", {"reward": 0.2, "interaction_id": first.id}, **name).ok
        said = first.choices[0].message.content or ""
        self.chat("2+2?", said, "sure?", extra_headers=name)
        last = self.chat("and 3+3?", extra_headers=name)
        assert self.rl("set_reward", {"reward": 1.0, "interaction_id": last.id}, **name).ok

    def left_alone(self) -> None:
        """Nothing names it; rewarded by the id of its answer, ended by nobody."""
        answer = self.chat("5+5?")
        said = answer.choices[0].message.content or ""
        again = self.chat("5+5?", said, "why?")
        assert self.rl("set_reward", {"reward": -0.5, "interaction_id": again.id}).ok

    def ended_by_its_verifier(self) -> None:
        answer = self.openai.responses.create(model="default", input="6+6?", max_output_tokens=6)
        assert self.rl("set_reward", {"reward": 0.7, "interaction_id": answer.id}).ok
        assert self.rl("end_session", {"interaction_id": answer.id}).json()["interaction_count"] == 1

    def named_in_its_body(self) -> None:
        """As Claude Code does: JSON in metadata.user_id."""
        user = json.dumps({"device_id": "d", "session_id": "s-1"})
        with Anthropic(base_url=self.url, api_key=TOKEN, timeout=120) as client:
            question: Any = [{"role": "user", "content": "7+7?"}]
            client.messages.create(model="default", max_tokens=6, messages=question, metadata={"user_id": user})
        assert self.rl("end_session", {}, **{"x-session-id": "s-1"}).ok  # without a reward: it counts 0

    def asks_the_judge(self, channel: StubChannel) -> None:
        """The gateway answers for the channel's models, and not to the session that they may score."""
        judged = self.openai.chat.completions.create(
            model="judge_model", messages=[{"role": "user", "content": "good?"}]
        )
        assert judged.choices[0].message.content == "9"
        started = requests.post(
            f"{self.url}/rl/start_session",
            json={"task_id": "curious"},
            headers={"x-api-key": "areal-admin-key"},
            timeout=60,
        )
        key = started.json()["api_key"]
        for name in ("judge_model", "large-judge"):
            with (
                OpenAI(base_url=f"{self.url}/v1", api_key=key) as curious,
                pytest.raises(PermissionDeniedError, match="may be what scores it"),
            ):
                curious.chat.completions.create(model=name, messages=[{"role": "user", "content": "good?"}])
        assert requests.post(
            f"{self.url}/rl/exclude_session",
            json={"session_id": "curious"},
            headers={"x-api-key": "areal-admin-key"},
            timeout=60,
        ).ok
        assert [call.json["model"] for call in channel.calls] == ["large-judge"]

    def abandoned(self) -> None:
        self.chat("nobody will ever reward this")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that took its one step from such sessions."""
    root = tmp_path_factory.mktemp("implicit")
    command = "python examples/openclaw/train.py --config examples/openclaw/config.yaml "
    overrides = [
        "experiment_name=e",
        "trial_name=t",
        "actor.path=tiny-qwen3",
        "total_train_epochs=1",
        "total_train_steps=1",
        "rollout.native.max_context=256",
        "rollout.agent.gateway_port=0",
        f"rollout.agent.internal_token={TOKEN}",
        "rollout.agent.max_turns=3",
        f"rollout.agent.reward_grace_seconds={IDLE_S}",
        f"rollout.agent.session_timeout_seconds={IDLE_S}",
        f"cluster.fileroot={root}",
    ]
    with StubChannel(chat("9")) as channel:
        overrides += [
            f"api_gateway.base_url={channel.url}",
            "api_gateway.api_key=sk-of-the-channel-0815",
            "model_routing.judge_model.model_id=large-judge",
        ]
        code, output = _played(command + shlex.join(overrides), root / "e" / "t" / "logs" / "train.log", channel)
    assert code == 0, output
    assert "[train] step=0 updated=4 loss=" in output
    return root / "e" / "t"


def _played(command: str, log: Path, channel: StubChannel) -> tuple[int, str]:
    """Its exit code and what it printed."""
    with service(command, log=log) as run:
        agents = Agents(run.url)
        agents.abandoned()  # first, so that it is idle for the longest
        agents.left_alone()
        agents.to_the_last_turn()
        agents.ended_by_its_verifier()
        agents.named_in_its_body()
        agents.asks_the_judge(channel)
        return run.end(), run.output.read_text()


async def read(folder: Path) -> tuple[Counts, dict[str, SessionSummary]]:
    async with await open_store(store_url(folder / "store.sqlite")) as store:
        return await store.training.counts(), {one.session.id: one for one in await store.reading.recent()}


def test_the_step_is_taken_from_them_and_learns(run: Path) -> None:
    table = read_metrics(run / "logs" / "metrics.jsonl")
    assert table.series("train/sessions").values == [4]
    assert table.series("train/reward").values == pytest.approx([(0.2 + 1.0 - 0.5 + 0.7 + 0.0) / 4])
    assert table.series("train/grad_norm").values[0] > 0


def test_a_call_to_the_channel_is_a_line_of_the_gateways_log(run: Path) -> None:
    log = (run / "logs" / "gateway.log").read_text()
    assert log.count("[taotoken] model=judge_model model_id=large-judge status=200 elapsed_ms=") == 1
    assert "sk-of-the-channel" not in log + (run / "config.yaml").read_text() + (run / "logs" / "train.log").read_text()


def test_each_ends_as_it_should_and_is_trained_or_counted(run: Path) -> None:
    _, sessions = asyncio.run(read(run))
    fates = Counter((str(one.session.ending), one.fate, one.session.interaction_count) for one in sessions.values())
    assert fates == {
        ("ended", "trained at step 1", 3): 1,  # its last turn
        ("expired", "trained at step 1", 2): 1,  # idle, with a reward
        ("ended", "trained at step 1", 1): 2,  # by its verifier, and by its name
        ("expired", "dropped (expired)", 1): 1,  # idle, without one: counted, not trained, and still in the store
        ("excluded", "dropped (excluded)", 0): 1,  # of asks_the_judge
    }
    assert sessions["hint-personal"].session.interaction_count == 3
    assert sessions["hint-s-1"].reward is None


def test_every_token_of_them_is_accounted_for(run: Path) -> None:
    counts, sessions = asyncio.run(read(run))
    assert counts.recorded_tokens == counts.trained_tokens + counts.masked_tokens + counts.dropped_tokens > 0
    assert counts.running_sessions == 0
    [abandoned] = [one for one in sessions.values() if one.fate == "dropped (expired)"]
    assert counts.dropped_tokens == abandoned.recorded_tokens > 0
    trained = sum(read_metrics(run / "logs" / "metrics.jsonl").series("train/trained_tokens").values)
    assert counts.trained_tokens == trained > 0


def test_what_expired_is_said_in_the_log(run: Path) -> None:
    log = (run / "logs" / "worker-0.log").read_text()
    assert log.count("expired after") == 2
