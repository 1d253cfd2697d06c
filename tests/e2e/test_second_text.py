"""The walk through a whole training loop, typed in order in a clean clone: import, channel, configuration, one script, two kinds of log
line, throughput, a curve, the router's log, and every error of its list.

Changed as its reader changes them: the policy model, the channel (a stub: its address, key and model ids) and max_steps; and the port,
because tests run side by side. What needs no training runs with every test; the loop itself is heavy: a tiny net with experts in 4 × 2
processes, and SmolLM2 in one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests

from areal.base.guide import situation
from areal.base.logs import parse_line
from areal.base.metrics import read_metrics
from areal.store.location import find_store
from areal.web.address import bind
from tests.books import balanced
from tests.channel.stub import Call, Reply, StubChannel, chat, error
from tests.e2e.clone import KEY, Clone
from tests.e2e.running import ROOT, WITHIN_S

FIXTURES = ROOT / "tests" / "config" / "fixtures"
LAUNCH = "bash scripts/launch_async.sh"
GATEWAY = "python -m areal.gateway.server --config configs/taotoken_router.yaml --port {port} --log-level info"
PLOT = "python -m areal.tools.plot_metrics --log-dir ./logs/areal_async --metric loss --output ./plots/loss_curve.png"
CHANNEL_LINES = "grep taotoken ./logs/areal_async/gateway.log | tail -10"
STEPS = 10  # until the first [throughput] line: log_interval is 10


@pytest.fixture(scope="module")
def channel() -> Iterator[StubChannel]:
    """通了 to whoever tries it, 401 without the key, a number to whoever asks for a rating."""

    def answer(call: Call) -> Reply:
        if call.header("authorization") != f"Bearer {KEY}":
            return error(401, "Invalid API key", code="invalid_api_key")
        asked = str(call.json["messages"][-1]["content"])
        return chat("通了" if "通了" in asked else str(len(asked) % 5 / 4), model=call.json["model"])

    with StubChannel(answer) as stub:
        yield stub


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory, channel: StubChannel) -> Clone:
    clone = Clone.of(tmp_path_factory.mktemp("clone"))
    clone.give_it_a_channel(channel.url, "tiny-qwen3-warm")
    return clone


def test_its_files_are_there_with_its_keys_and_values() -> None:
    for name in ("agent_async_train.yaml", "taotoken_router.yaml"):
        printed, ours = (resolve_text(folder / name) for folder in (FIXTURES, ROOT / "configs"))
        assert printed == ours, name
    found: dict[str, dict[str, object]] = {}
    exec((ROOT / "agent_config.py").read_text(), found)  # the agent's own file: it is imported by the agent
    assert found["AGENT_CONFIG"] == {
        "model_base_url": "http://localhost:9000/gateway/v1",
        "model_name": "your-policy-model-id",
        "api_key": "gateway-internal-token",
        "max_turns": 10,
    }


def resolve_text(path: Path) -> object:
    import yaml

    return yaml.safe_load(path.read_text())


def test_2_2_the_package_can_be_imported_and_says_its_version(clone: Clone) -> None:
    done = clone.type('python -c "import areal; print(areal.__version__, areal.__file__)"')
    version, file = done.stdout.split()
    assert version == "1.0.0"
    assert file.startswith(str(clone.folder))


def test_2_5_the_channel_is_tried_by_itself(clone: Clone, channel: StubChannel) -> None:
    done = clone.type("python scripts/check_channel.py")
    assert (done.returncode, done.stdout) == (0, "通了\n"), done.stderr
    assert channel.calls[-1].json["model"] == "the-channels-reward-model"


def test_3_1_the_configuration_resolves_to_what_its_table_says(clone: Clone) -> None:
    shown = clone.type(
        "python -m areal.train --config configs/agent_async_train.yaml --agent-config agent_config.py --dry-run"
    )
    assert shown.returncode == 0, shown.stderr
    assert "would not start" not in shown.stderr
    for line in (
        "backend: archon:d4t2p1c1e1",
        "max_head_offpolicyness: 2",
        "workers: 8",
        "batch_size: 32",
        "max_batch_size: 64",
    ):
        assert line in shown.stdout, line
    assert KEY not in shown.stdout + shown.stderr


def test_3_1_placeholders_that_were_left_are_named_before_anything_starts(tmp_path: Path) -> None:
    """The text as it is printed, typed without a thought."""
    as_printed = Clone.of(tmp_path)
    the_key = as_printed.type(LAUNCH, TAOTOKEN_API_KEY="sk-你的key")
    assert the_key.returncode == 1
    assert "api_gateway.api_key is still the placeholder" in the_key.stderr
    assert "training was not started" in the_key.stderr
    the_models = as_printed.type(LAUNCH)
    assert the_models.returncode == 2
    for role in ("policy_model", "reward_model", "judge_model"):
        assert f"model_routing.{role}.model_id is still the placeholder" in the_models.stderr, the_models.stderr
    for said in (the_key.stderr, the_models.stderr):
        assert situation("placeholder").said_in(said)
        assert "Traceback" not in said


def test_5_1_a_key_that_is_not_exported_and_one_that_is_wrong(clone: Clone) -> None:
    unset = clone.type(LAUNCH, without="TAOTOKEN_API_KEY")
    assert unset.returncode == 1
    assert situation("variable-unset").said_in(unset.stderr)
    assert "TAOTOKEN_API_KEY" in unset.stderr
    assert "training was not started" in unset.stderr
    wrong = clone.type("python scripts/check_channel.py", TAOTOKEN_API_KEY="sk-nonsense")
    assert wrong.returncode == 3
    assert "the key is wrong: api_gateway.api_key" in wrong.stderr
    assert "Invalid API key" in wrong.stderr
    stripped = clone.type("python scripts/check_channel.py", TAOTOKEN_API_KEY=f" {KEY}\n")
    assert stripped.returncode == 0, "copied with a line end"


def test_5_2_a_taken_port_names_who_has_it_and_what_to_change(clone: Clone) -> None:
    holder = bind("127.0.0.1", clone.port)
    try:
        done = clone.type(LAUNCH)
    finally:
        holder.close()
    assert done.returncode == 1
    assert situation("port-taken").said_in(done.stderr)
    assert f"port {clone.port} is taken" in done.stderr
    assert f"pid {os.getpid()}" in done.stderr, "which process has it"
    assert situation("gateway-died").said_in(done.stderr)


def test_5_3_an_answer_without_choices_is_shown(clone: Clone, channel: StubChannel) -> None:
    channel.script(Reply(200, json.dumps({"error": {"message": "model is overloaded"}}).encode()))
    done = clone.type("python scripts/check_channel.py")
    assert done.returncode == 1
    assert situation("no-choices").said_in(done.stderr)
    assert '{"error": {"message": "model is overloaded"}}' in done.stderr, "the whole body"


@pytest.fixture(scope="module")
def gateway(clone: Clone, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The gateway alone, by the command of the script."""
    running = clone.begin("exec " + GATEWAY.format(port=clone.port), tmp_path_factory.mktemp("gateway") / "output")
    url = f"http://localhost:{clone.port}"
    try:
        deadline = time.monotonic() + WITHIN_S
        while f"Gateway ready at http://127.0.0.1:{clone.port}" not in running.output.read_text():
            assert running.process.poll() is None, running.output.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield url
    finally:
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(timeout=60) == 0


def ask(url: str, key: str, model: str) -> requests.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "3+4="}]}
    return requests.post(
        f"{url}/gateway/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=60
    )


def test_4_4_the_routers_log_has_the_model_its_time_and_its_attempts(
    clone: Clone, gateway: str, channel: StubChannel
) -> None:
    channel.script(error(500, "come again"), chat("0.5"))
    assert ask(gateway, "gateway-internal-token", "reward_model").status_code == 200
    found = parse_line(clone.type(CHANNEL_LINES).stdout.splitlines()[-1])
    assert found is not None
    wanted = {"model": "reward_model", "model_id": "the-channels-reward-model", "status": 200, "attempts": 2}
    assert {name: found.facts[name] for name in wanted} == wanted
    assert float(str(found.facts["elapsed_ms"])) > 0


def test_5_1_and_5_3_what_an_agent_hears_through_the_gateway(gateway: str, channel: StubChannel) -> None:
    channel.script(error(401, "Invalid API key"))
    refused = ask(gateway, "gateway-internal-token", "reward_model")
    assert situation("channel-key").said_in(refused.json()["error"]["message"])
    channel.script(Reply(200, b'{"id": "x", "choices": []}'))
    empty = ask(gateway, "gateway-internal-token", "reward_model")
    assert empty.status_code == 502
    assert situation("no-choices").said_in(empty.json()["error"]["message"])
    policy = ask(gateway, "gateway-internal-token", "your-policy-model-id")
    assert policy.status_code in (404, 503), policy.json()


def test_5_4_claude_code_with_its_oauth_login_is_told_what_to_set(gateway: str) -> None:
    for headers in ({"authorization": "Bearer sk-ant-oat01-abcdefgh"}, {"x-api-key": "sk-ant-api03-abcdefgh"}):
        body = {"model": "default", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
        told = requests.post(f"{gateway}/gateway/v1/messages", json=body, headers=headers, timeout=60)
        assert told.status_code == 401, told.json()
        assert told.json()["error"]["type"] == "authentication_error"
        assert situation("oauth").said_in(told.json()["error"]["message"])


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        (["async.enabled=false", "async.staleness_threshold=0"], 0, "async-off"),
        (["async.enabled=false", "async.rollout_workers=0"], 2, "async.rollout_workers"),
        (["async.rollout_workers=0", "async.staleness_threshold=0"], 2, "async.rollout_workers"),
        (["async.train_workers=0", "async.staleness_threshold=0"], 2, "async-no-workers"),
        (["async.staleness_threshold=0"], 0, "async-lag-0"),
        ([], 0, None),
    ],
)
def test_5_5_a_run_that_does_not_overlap_says_which_of_the_three_it_is(
    clone: Clone, changes: list[str], code: int, says: str | None
) -> None:
    """enabled, then both numbers of workers, then the lag."""
    command = "python -m areal.train --config configs/agent_async_train.yaml --dry-run"
    done = clone.type(" ".join([command, "rollout.agent.internal_token=t-0815", *changes]))
    assert done.returncode == code, done.stderr
    situations = [situation(name) for name in ("async-off", "async-no-workers", "async-lag-0")]
    said = [one.name for one in situations if one.said_in(done.stderr)]
    if says is None or says.startswith("async-"):
        assert said == ([says] if says else [])
    else:
        assert says in done.stderr


@dataclass(frozen=True)
class Loop:
    """A whole run of the script, with agents beside it. output: what the terminal showed."""

    clone: Clone
    code: int
    output: str

    def lines(self, part: str) -> list[dict[str, object]]:
        parsed = map(parse_line, (self.clone.logs / "train.log").read_text().splitlines())
        return [line.facts for line in parsed if line is not None and line.part == part]


def whole_loop(folder: Path, channel: StubChannel, *, model: str, steps: int, flags: str, overrides: str) -> Loop:
    """Sections 3 and 4: the script as it is printed, its agent, until max_steps. flags: of the agent."""
    clone = Clone.of(folder / "clone")
    clone.give_it_a_channel(channel.url, model)
    clone.change("configs/agent_async_train.yaml", "max_steps: 2000", f"max_steps: {steps}")
    run = clone.begin(f"chmod +x scripts/launch_async.sh; {LAUNCH} {overrides}", folder / "output")
    agent: subprocess.Popen[bytes] | None = None
    try:
        run.text("Proxy gateway available at ")
        words = [sys.executable, str(ROOT / "tests" / "e2e" / "sdk_agent.py"), *flags.split()]
        with (folder / "agent").open("wb") as said:
            env = clone.env(OPENAI_BASE_URL=f"http://localhost:{clone.port}/gateway/v1")
            agent = subprocess.Popen(words, cwd=clone.folder, env=env, stderr=said)
        code = run.process.wait(timeout=1500)
        return Loop(clone, code, run.output.read_text())
    finally:
        if agent is not None:
            agent.kill()
            agent.wait()
        if run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGTERM)
            run.process.wait(timeout=120)


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory, channel: StubChannel) -> Loop:
    """The tiny net with experts, in dp 4 × tp 2 = 8 processes, its experts in pairs."""
    folder = tmp_path_factory.mktemp("loop")
    overrides = "train.parallelism.ep=2"
    return whole_loop(
        folder, channel, model="tiny-qwen3-moe-warm", steps=STEPS, flags="--at-once 24", overrides=overrides
    )


@pytest.mark.heavy
@pytest.mark.timeout(1800)
class TestTheLoop:
    def test_3_3_one_script_runs_it_to_its_end_and_stops_the_gateway(self, loop: Loop) -> None:
        assert loop.code == 0, loop.output[-4000:]
        assert "Gateway started, PID=" in loop.output
        assert f"Proxy gateway available at http://127.0.0.1:{loop.clone.port}" in loop.output
        assert "archon:d4t2p1c1e2" in (loop.clone.folder / "checkpoints/run_001/config.yaml").read_text()
        with pytest.raises(requests.ConnectionError):
            requests.get(f"http://127.0.0.1:{loop.clone.port}/health", timeout=10)
        assert (loop.clone.folder / "checkpoints" / "run_001" / "checkpoints").is_dir()

    def test_4_1_both_kinds_of_line_come_interleaved_and_within_the_lag(self, loop: Loop) -> None:
        command = 'timeout 2 tail -n +1 -f ./logs/areal_async/train.log | grep -E "rollout|train"'
        shown = loop.clone.type(command).stdout.splitlines()
        kinds = [line.split("]")[0][1:] for line in shown if re.match(r"\[(rollout|train)\] step=\d+ ", line)]
        assert kinds.count("train") == STEPS
        assert "rollout rollout" in " ".join(kinds), "strictly alternating lines would be a synchronous run"
        printed = {"rollout": -1, "train": -1}
        pattern = (
            r"\[rollout\] step=\d+ generated=\d+ tokens=\d+ ts=\S+ |\[train\] step=\d+ updated=\d+ loss=\S+ ts=\S+ "
        )
        for line in (line for line in shown if line.startswith(("[rollout] ", "[train] "))):
            assert re.match(pattern, line), line
            found = parse_line(line)
            assert found is not None
            printed[found.part] = int(str(found.facts["step"]))
            assert 0 <= printed["rollout"] - printed["train"] <= 3, line
        assert all(32 <= int(str(line["updated"])) <= 64 for line in loop.lines("train"))
        assert max(int(str(line["lag_max"])) for line in loop.lines("train")) in (1, 2), (
            "asynchronous, within the threshold"
        )

    def test_4_2_the_throughput_is_that_of_a_hand_count(self, loop: Loop) -> None:
        shown = loop.clone.type("grep throughput ./logs/areal_async/train.log | tail -20").stdout
        [line] = [found.facts for found in map(parse_line, shown.splitlines()) if found and found.part == "throughput"]
        assert line["step"] == STEPS - 1
        samples = sum(int(str(one["updated"])) for one in loop.lines("train"))
        seconds = sum(float(str(one["step_seconds"])) for one in loop.lines("train"))
        assert float(str(line["samples_per_second"])) == pytest.approx(samples / seconds, rel=0.3)

    def test_4_3_the_curve_is_drawn(self, loop: Loop) -> None:
        done = loop.clone.type(PLOT, DISPLAY="localhost:64.0", MPLBACKEND="")
        assert done.returncode == 0, done.stderr
        assert (loop.clone.folder / "plots" / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
        assert len(read_metrics(loop.clone.logs / "metrics.jsonl").series("train/loss").values) == STEPS

    def test_4_4_the_reward_model_was_asked_through_the_channel(self, loop: Loop) -> None:
        lines = [found.facts for found in map(parse_line, loop.clone.type(CHANNEL_LINES).stdout.splitlines()) if found]
        assert len(lines) == 10
        assert {(line["model"], line["model_id"], line["status"]) for line in lines} == {
            ("reward_model", "the-channels-reward-model", 200)
        }
        rewards = read_metrics(loop.clone.logs / "metrics.jsonl").series("train/reward").values
        assert all(0 < reward < 1 for reward in rewards), "what the stub said, in the mean"

    def test_the_turns_that_rows_share_are_computed_once(self, loop: Loop) -> None:
        """Ten turns a conversation, each a row with all before it. A step goes through its rows twice: first for the proximal policy."""
        table = read_metrics(loop.clone.logs / "metrics.jsonl")
        computed, in_rows = (sum(table.series(f"train/{name}").values) for name in ("computed_tokens", "row_tokens"))
        assert 2 * in_rows > 4 * computed

    def test_every_token_is_accounted_for_and_no_key_shows(self, loop: Loop) -> None:
        run = loop.clone.folder / "checkpoints" / "run_001"
        assert find_store(run)
        books = balanced(run).books
        assert len(books.trained_by_version) == STEPS
        assert books.trained.tokens > 0
        for path in (*loop.clone.logs.iterdir(), run / "config.yaml"):
            text = path.read_text(errors="replace")
            assert KEY not in text, path
            assert "gateway-internal-token" not in text, path


@pytest.mark.heavy
@pytest.mark.timeout(1800)
def test_the_same_with_a_real_model_in_one_process(tmp_path: Path, channel: StubChannel) -> None:
    """SmolLM2; a conversation is ended after one answer and a step takes 8 to 16 of them, which two cores get through in minutes."""
    one = "train.parallelism.tp=1 train.parallelism.dp=1 async.train_workers=1 logging.log_interval=1"
    one += " async.trigger_batch_size=8 train.global_batch_size=16"
    loop = whole_loop(
        tmp_path, channel, model="smollm2-135m", steps=2, flags="--at-once 16 --end-after 1", overrides=one
    )
    assert loop.code == 0, loop.output[-4000:]
    assert [8 <= int(str(line["updated"])) <= 16 for line in loop.lines("train")] == [True, True]
    table = read_metrics(loop.clone.logs / "metrics.jsonl")
    assert max(table.series("train/logprob_gap_max").values) < 1e-3
    assert min(table.series("train/grad_norm").values) > 0
    assert len(balanced(loop.clone.folder / "checkpoints" / "run_001").books.trained_by_version) == 2
    assert loop.clone.type(PLOT).returncode == 0
    assert "model=reward_model" in loop.clone.type(CHANNEL_LINES).stdout
    assert len(loop.lines("throughput")) == 2
