"""A run whose sessions a judge rewards, with a judge that is slow, answers garbage, hangs, is down, comes back, takes 30 s for a verdict; and a
controller that is killed.

One run, one life after the other; each test is a part of its story, in order.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest

from areal.base.logs import parse_line
from areal.store import open_store, store_url
from areal.store.base import Store
from tests.books import balanced
from tests.channel.stub import Call, Reply, StubChannel, chat, error
from tests.faults.target import wait_for

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]  # the bound is for a run that hangs
T = TypeVar("T")
SHORT_LIMITS = {
    "rollout.reward.timeout_seconds": 3,
    "rollout.reward.attempts": 2,
    "rollout.reward.down_after_seconds": 1,
    "api_gateway.breaker_seconds": 1,
}
LATE_S = 30.0


class Judge:
    """What the channel does now: `good`, `slow`, `mixed` (garbage for sums of 1, no answer for sums of 0), `hangs`, `down`, `late` (the
    next verdict alone hangs)."""

    def __init__(self) -> None:
        self.mode = "good"
        self.released = threading.Event()
        self.late_since = 0.0  # time.monotonic

    def __call__(self, call: Call) -> Reply:
        asked = call.json["messages"][0]["content"]
        if self.mode == "down":
            return error(503, "the judge is being moved")
        if "<answer-" not in asked:
            return chat("ok")
        verdict = chat(f"Well.\n**Verdict:** {'correct' if call.number % 2 else 'incorrect'}")
        if self.mode == "slow":
            return Reply(body=verdict.body, delay_s=0.5)
        if self.mode == "late":
            self.mode, self.late_since = "good", time.monotonic()
            return Reply(body=verdict.body, gate=self.released)
        if self.mode == "hangs" or (self.mode == "mixed" and '"x":0' in asked):
            return Reply(body=verdict.body, gate=self.released)
        return chat("I could not say: 1, or 0?") if self.mode == "mixed" and '"x":1' in asked else verdict


class Story:
    """The run and its judge."""

    def __init__(self, folder: Path, channel: StubChannel, judge: Judge) -> None:
        self.folder, self.run, self.judge, self.channel = folder, folder / "run", judge, channel
        self.controller: subprocess.Popen[bytes] | None = None
        self.seen = 0  # lines of train.log that former lives have left

    def start(self, limits: Mapping[str, Any] = SHORT_LIMITS) -> None:
        settings = {
            "total_train_steps": 100000,
            "cluster.fileroot": self.folder,
            "actor.path": "tiny-qwen3",
            "train_dataset.batch_size": 2,
            "gconfig.n_samples": 2,
            "rollout.max_concurrent_rollouts": 8,
            "rollout.agent.gateway_port": 0,
            "rollout.agent.reward_source": "judge_model",
            "rollout.reward.cache_size": 0,
            "model_routing.judge_model.model_id": "judge-1",
            "api_gateway.base_url": self.channel.url,
            "api_gateway.api_key": "sk-test",
            "api_gateway.max_retries": 0,
            "recover.freq_steps": 2,
            "evaluator.path": "null",
        } | dict(limits)
        self.seen = len(self.log())
        words = [sys.executable, "-m", "areal.train", "--config", "configs/tiny.yaml", "--output-dir", str(self.run)]
        with (self.folder / "out").open("ab") as out:
            self.controller = subprocess.Popen(
                [*words, *(f"{key}={value}" for key, value in settings.items())],
                cwd=ROOT, stdout=out, stderr=out, env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def log(self) -> list[str]:
        path = self.run / "logs" / "train.log"
        return path.read_text().splitlines() if path.exists() else []

    def said(self, words: str) -> list[str]:
        """Lines of this life."""
        return [line for line in self.log()[self.seen :] if words in line]

    def steps(self) -> int:
        parsed = (parse_line(line) for line in self.log()[self.seen :])
        return sum(line is not None and line.part == "train" for line in parsed)

    def until_steps(self, more: int) -> None:
        wanted = self.steps() + more
        self.until(lambda: self.steps() >= wanted, f"{more} more steps")

    def until(self, holds: Callable[[], object], what: str) -> None:
        assert self.controller is not None
        wait_for(lambda: holds() or (self.controller is not None and self.controller.poll() is not None), what)
        assert self.controller.poll() is None, (self.folder / "out").read_text()[-3000:]

    def look(self, ask: Callable[[Store], Awaitable[T]]) -> T:
        async def read() -> T:
            async with await open_store(store_url(self.run / "store.sqlite"), read_only=True) as store:
                return await ask(store)

        return asyncio.run(read())

    def failed(self) -> int:
        return self.look(lambda store: store.reading.dropped_sessions()).get("reward_failed", 0)

    def waiting(self) -> set[str]:
        found = self.look(lambda store: store.rewards.waiting())
        return {one.session.id for one in found}

    def gateway(self) -> str:
        return str(json.loads((self.run / "processes" / "gateway.ready.json").read_text())["url"])

    def ask_for_a_session(self) -> tuple[int, dict[str, Any]]:
        request = urllib.request.Request(
            f"{self.gateway()}/rl/start_session",
            b'{"task_id": "by hand"}',
            {"Authorization": "Bearer areal-admin-key", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as refused:
            return refused.code, json.load(refused)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    judge = Judge()
    with StubChannel(judge) as channel:
        told = Story(tmp_path_factory.mktemp("judge"), channel, judge)
        told.start()
        yield told
        judge.released.set()
        if told.controller is not None and told.controller.poll() is None:
            told.controller.kill()
        assert told.controller is not None
        told.controller.wait()


def test_a_slow_judge_rewards_what_is_trained(story: Story) -> None:
    story.judge.mode = "slow"
    story.until_steps(3)
    assert story.failed() == 0
    assert {call.json["model"] for call in story.channel.calls} == {"judge-1"}, (
        "through the gateway, which knows the route"
    )
    lines = (story.run / "logs" / "gateway.log").read_text()
    assert "[taotoken] model=judge_model model_id=judge-1 status=200" in lines


def test_no_step_waits_for_what_the_judge_does_not_answer_and_garbage_is_counted(story: Story) -> None:
    story.judge.mode = "mixed"
    story.until(lambda: story.failed() >= 4, "sessions without a reward")
    story.until_steps(2)
    story.until(lambda: story.said("dropped (reward_failed)"), "a line that says why")
    [reward] = {line.partition(": ")[2] for line in story.said("dropped (reward_failed)")[:1]}
    assert "single verdict" in reward or "no answer within 3 s" in reward
    assert story.look(lambda store: store.reading.balance()).faults == ()


def test_a_judge_that_is_down_pauses_admission_and_costs_nothing(story: Story) -> None:
    story.judge.mode = "good"
    story.until_steps(1)
    story.judge.mode = "down"
    story.until(lambda: story.said("judge_model (judge-1) gives no rewards since"), "the sentence")
    before = story.failed()
    [sentence] = story.said("judge_model (judge-1) gives no rewards since")
    assert "the judge is being moved" in sentence or "503" in sentence
    assert "wait for their reward, and nothing is dropped" in sentence
    story.until(lambda: story.ask_for_a_session()[0] == 429, "a refusal")
    status, body = story.ask_for_a_session()
    assert (status, body["error"]["code"]) == (429, "admission_held")
    assert "judge_model (judge-1) gives no rewards since" in body["error"]["message"]
    with urllib.request.urlopen(f"{story.gateway()}/health", timeout=60) as answer:
        assert "judge_model (judge-1) gives no rewards since" in json.load(answer)["held"]
    story.until(lambda: not story.look(lambda store: store.training.counts()).running_sessions, "the agents' end")
    waiting = story.waiting()
    assert waiting
    assert "no session starts: judge_model (judge-1)" in balanced(story.run).waits_for
    calls = len(story.channel.calls)
    story.until(lambda: len(story.channel.calls) >= calls + 2, "two more looks")
    assert (story.waiting(), story.failed()) == (waiting, before)

    story.judge.mode = "good"
    story.until(lambda: story.said("judge_model (judge-1) answers again after"), "the good news")
    story.until_steps(3)
    story.until(lambda: not waiting & story.waiting(), "their rewards")
    assert story.failed() == before


def test_a_killed_controller_loses_no_session_that_waited(story: Story) -> None:
    assert story.controller is not None
    story.judge.mode = "hangs"
    story.until(lambda: len(story.waiting()) >= 4, "sessions that wait")
    story.controller.send_signal(signal.SIGKILL)
    story.controller.wait()
    waited = story.waiting()
    assert len(waited) >= 4
    story.judge.mode = "good"
    story.judge.released.set()
    story.start(limits={})
    story.until(lambda: not waited & story.waiting(), "the rewards of what waited")
    fates = [story.look(lambda store, name=name: store.reading.session(name)) for name in sorted(waited)]
    assert all(one.reward in (0.0, 1.0) and not one.drop_reason for one in fates), fates
    story.until_steps(3)


def test_a_verdict_that_takes_30_s_is_waited_for_while_the_others_train(story: Story) -> None:
    """Under the limits that every run has."""
    story.judge.released.clear()
    failed = story.failed()
    story.judge.mode = "late"
    story.until(lambda: story.judge.late_since, "the question that is answered late")
    waited = story.waiting()
    story.until_steps(3)
    story.until(lambda: len(waited & story.waiting()) == 1, "the verdicts about the others")
    [late] = waited & story.waiting()
    time.sleep(max(0.0, LATE_S - (time.monotonic() - story.judge.late_since)))
    assert late in story.waiting(), "three steps were made without it"
    story.judge.released.set()
    story.until(lambda: late not in story.waiting(), "the verdict")
    fate = story.look(lambda store: store.reading.session(late))
    assert fate is not None
    assert (fate.reward in (0.0, 1.0), fate.drop_reason in ("", "stale")) == (True, True), fate
    assert (story.failed(), story.said("gives no rewards since")) == (failed, [])


def test_a_run_that_ends_does_not_wait_for_its_judge(story: Story) -> None:
    assert story.controller is not None
    story.judge.released.clear()
    story.judge.mode = "hangs"
    story.until(lambda: story.waiting(), "sessions that wait")
    story.controller.send_signal(signal.SIGTERM)
    assert story.controller.wait(timeout=300) == 0, (story.folder / "out").read_text()[-3000:]
    status = balanced(story.run)
    assert status.books.awaiting_reward.sessions > 0, "they wait for the next life"
    assert status.books.trained.tokens > 0
