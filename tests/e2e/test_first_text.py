"""The guide to online training, typed in order as it is printed: its YAML, its command, its curl and Python snippets, every row of its error
table, the defaults of its configuration table and what its FAQ says.

Only what this machine does not have is another: the model (`actor.path`), the backend, a free port, the folder of the runs. One
service runs for all tests of this file; each makes sessions of its own.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from areal.base.guide import situation
from areal.base.metrics import read_metrics
from areal.config.load import resolve
from areal.config.rollout import AgentConfig
from areal.config.startable import why_not
from tests.books import balanced
from tests.e2e.running import ROOT, Running, environment, service, typed
from tests.faults.target import READY, wait_for

pytestmark = pytest.mark.timeout(900)

STEP_1 = """\
rollout:
  agent:
    mode: online
    admin_api_key: "my-secret-admin-key"
    session_timeout_seconds: 3600
"""
STEP_2 = """\
python3 examples/openclaw/train.py --config examples/openclaw/config.yaml \\
    experiment_name=my-exp trial_name=trial-0 \\
    rollout.backend=sglang:d1 actor.backend=fsdp:d1 \\
    actor.path=Qwen/Qwen3-0.6B \\
    scheduler.type=local \\
    rollout.agent.admin_api_key=my-secret-admin-key"""
STEP_3 = """\
curl -X POST http://<gateway>/rl/start_session \\
  -H "Content-Type: application/json" \\
  -H "Authorization: Bearer my-secret-admin-key" \\
  -d '{"task_id": "demo-task-0"}'"""
STEP_4 = """\
curl http://<gateway>/chat/completions \\
  -H "Content-Type: application/json" \\
  -H "Authorization: Bearer sk-sess-xxxxxxxxxxxx" \\
  -d '{
    "model": "default",
    "messages": [{"role": "user", "content": "12 * 15 + 3 等于多少？"}],
    "temperature": 0.7
  }'"""
STEP_4_PYTHON = """\
from openai import OpenAI

client = OpenAI(
    base_url="http://<gateway>",
    api_key="sk-sess-xxxxxxxxxxxx",
)

response = client.chat.completions.create(
    model="default",
    messages=[{"role": "user", "content": "12 * 15 + 3 等于多少？"}],
)
print(response.choices[0].message.content)
"""
STEP_5_REWARD = """\
curl http://<gateway>/rl/set_reward \\
  -H "Content-Type: application/json" \\
  -H "Authorization: Bearer sk-sess-xxxxxxxxxxxx" \\
  -d '{"reward": 1.0}'"""
STEP_5_END = """\
curl http://<gateway>/rl/end_session \\
  -H "Content-Type: application/json" \\
  -H "Authorization: Bearer sk-sess-xxxxxxxxxxxx" \\
  -d '{}'"""
REFERENCE = """\
rollout:
  agent:
    mode: online
    admin_api_key: "areal-admin-key"
    session_timeout_seconds: 3600
    turn_discount: 1.0
    export_style: individual
"""
ADMIN = "my-secret-admin-key"
BATCH, LAG = 4, 2  # of examples/openclaw/config.yaml
SCRIPTS = ROOT / "examples" / "openclaw"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: Any

    @property
    def error(self) -> str:
        return str(self.body["error"]["message"])


@dataclass(frozen=True)
class Gateway:
    """The service, and what a shell beside it types."""

    run: Running
    url: str

    def fill(self, text: str, key: str = "") -> str:
        return text.replace("http://<gateway>", self.url).replace("sk-sess-xxxxxxxxxxxx", key)

    def curl(self, text: str, key: str = "") -> Any:
        """What a printed snippet answers, which has to be a 200."""
        done = typed(self.fill(text, key).replace("curl ", "curl -sS --fail-with-body ", 1))
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    def post(self, path: str, body: Any, key: str | None, **headers: str) -> Answer:
        own = {} if key is None else {"authorization": f"Bearer {key}"}
        answer = requests.post(f"{self.url}{path}", json=body, headers=own | headers, timeout=300)
        return Answer(
            answer.status_code, {name.lower(): value for name, value in answer.headers.items()}, answer.json()
        )

    def start(self, task: str = "task", **more: Any) -> Answer:
        return self.post("/rl/start_session", {"task_id": task, **more}, ADMIN)

    def key(self, task: str = "task") -> str:
        started = self.start(task)
        assert started.status == 200, started.body
        return str(started.body["api_key"])

    def chat(self, key: str | None) -> Answer:
        messages = [{"role": "user", "content": "3+4="}]
        return self.post("/chat/completions", {"model": "default", "messages": messages, "max_tokens": 4}, key)

    def end(self, key: str) -> Answer:
        return self.post("/rl/end_session", {}, key)

    def trained(self) -> int:
        """Steps up to now."""
        return len(self.run.lines("train"))

    def versions(self, session_id: str) -> set[int]:
        exported = self.post("/rl/export_trajectories", {"session_id": session_id, "style": "individual"}, ADMIN)
        assert exported.status == 200, exported.body
        return {int(version) for one in exported.body["interactions"] for version in one["versions"]}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    root = tmp_path_factory.mktemp("first-text")
    here = STEP_2.replace("rollout.backend=sglang:d1", "rollout.backend=native:d1")
    here = here.replace("actor.path=Qwen/Qwen3-0.6B", "actor.path=tiny-qwen3-warm")
    here += f" \\\n    rollout.agent.gateway_port=0 cluster.fileroot={root}"
    with service(here, log=root / "my-exp" / "trial-0" / "logs" / "train.log") as run:
        yield Gateway(run, run.url)


def test_step_1_the_yaml_of_the_guide_is_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(STEP_1)
    command = STEP_2.replace("--config examples/openclaw/config.yaml", f"--config {tmp_path / 'config.yaml'}")
    shown = typed(command.replace("sglang", "native") + " --dry-run")
    assert shown.returncode == 0, shown.stderr
    assert "mode: online" in shown.stdout
    assert "session_timeout_seconds: 3600" in shown.stdout
    assert ADMIN not in shown.stdout + shown.stderr, "--dry-run masks secrets"


def test_step_2_what_the_guide_prints_and_is_not_here_is_a_sentence() -> None:
    as_printed = typed(STEP_2)
    assert as_printed.returncode == 2
    assert (
        "rollout.backend=sglang:d1: SGLang is not part of this version; use rollout.backend=native:d1"
        in as_printed.stderr
    )
    assert "Traceback" not in as_printed.stderr


def test_step_2_prints_the_address_of_the_gateway(gateway: Gateway) -> None:
    log = gateway.run.text("Proxy gateway available at")
    assert f"(AReaL) RLTrainer INFO: Proxy gateway available at {gateway.url}" in log
    assert gateway.url.startswith("http://127.0.0.1:")
    assert f"(AReaL) RLTrainer INFO: Proxy gateway available at {gateway.url}" in gateway.run.output.read_text()


def test_steps_3_to_5_with_curl(gateway: Gateway) -> None:
    session = gateway.curl(STEP_3)
    assert session["session_id"] == "demo-task-0"
    assert session["api_key"].startswith("sk-sess-")
    answer = gateway.curl(STEP_4, session["api_key"])
    assert isinstance(answer["choices"][0]["message"]["content"], str)
    assert gateway.curl(STEP_5_REWARD, session["api_key"])
    assert gateway.curl(STEP_5_END, session["api_key"])["interaction_count"] == 1
    again = gateway.curl(STEP_3)
    assert again["session_id"] == "demo-task-0-1", "a task id that is taken gets a number"
    assert again["api_key"] != session["api_key"], "every session has a key of its own"
    assert gateway.curl(STEP_5_END, again["api_key"])["interaction_count"] == 0


def test_step_4_with_the_openai_sdk(gateway: Gateway) -> None:
    key = gateway.key("sdk")
    snippet = gateway.fill(STEP_4_PYTHON, key)
    done = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n")
    assert gateway.end(key).body["interaction_count"] == 1


def test_a_reward_for_a_step_in_the_middle_goes_by_the_id_of_its_completion(gateway: Gateway) -> None:
    key = gateway.key("middle")
    first = gateway.chat(key).body["id"]
    gateway.chat(key)
    assert gateway.post("/rl/set_reward", {"reward": 0.25, "interaction_id": first}, key).status == 200
    assert gateway.post("/rl/set_reward", {"reward": 1.0, "interaction_id": None}, key).status == 200
    gateway.end(key)
    exported = gateway.post("/rl/export_trajectories", {"session_id": "middle"}, ADMIN).body
    assert [one["reward"] for one in exported["interactions"]] == [0.25, 1.0], "null is the last one"


def test_step_6_many_sessions_at_once_and_training_begins_by_itself(gateway: Gateway, tmp_path: Path) -> None:
    before, sessions = gateway.trained(), 20
    (tmp_path / "questions.txt").write_text("3+4=\n5+5=\n9+9=\n")
    own = {"ADMIN_KEY": ADMIN, "SESSIONS": str(sessions), "AT_ONCE": "10", "TASK": "many", "MAX_TOKENS": "4"}
    own |= {"PROMPTS": str(tmp_path / "questions.txt"), "SLURM_ARRAY_TASK_ID": "7"}
    own |= {"REWARD_COMMAND": "read -r answer; [[ $PROMPT == 3+4= && $answer == 07 ]] && echo 1.0 || echo -0.5"}
    done = typed(f"bash scripts/sample_batch.sh {gateway.url}", env=own)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(f"{sessions} of {sessions} sessions ended well\n")
    assert {line.split(":")[0] for line in done.stdout.splitlines()[:-1]} == {f"many-7-{k}" for k in range(sessions)}
    steps = sessions // BATCH
    assert gateway.run.line("train", step=before + steps - 1)["updated"] == BATCH
    ahead = [int(str(line["step"])) for line in gateway.run.lines("rollout")]
    assert ahead == list(range(len(ahead))), "a [rollout] line for every step"


def test_step_6_a_batch_backs_off_while_no_slot_is_free(gateway: Gateway) -> None:
    held = []
    while (started := gateway.start("held")).status == 200:
        held.append(started.body["api_key"])
    own = {"ADMIN_KEY": ADMIN, "SESSIONS": "1", "TASK": "patient", "MAX_TOKENS": "4"}
    command = ["bash", "scripts/sample_batch.sh", gateway.url]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(own), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as batch:
        assert batch.stderr is not None
        assert batch.stderr.readline() == f"session 0 waits: HTTP 429, again every {started.headers['retry-after']} s\n"
        for key in held:
            gateway.end(key)
        said, errors = batch.communicate(timeout=240)
    assert (batch.returncode, errors) == (0, "")
    assert said == "patient-0: reward 1.0\n1 of 1 sessions ended well\n"


def test_a_session_that_fails_in_a_batch_is_said_and_its_slot_is_free_again(gateway: Gateway) -> None:
    own = {"ADMIN_KEY": ADMIN, "SESSIONS": "2", "TASK": "bad", "TEMPERATURE": "7"}
    done = typed(f"bash scripts/sample_batch.sh {gateway.url}", env=own)
    assert done.returncode == 1
    assert "chat: HTTP 400" in done.stderr
    assert "temperature" in done.stderr
    assert done.stdout == "0 of 2 sessions ended well\n"
    running = gateway.post("/rl/export_trajectories", {"session_id": "bad-0"}, ADMIN)
    assert running.status == 200, running.body
    wrong = typed(f"bash scripts/sample_batch.sh {gateway.url}", env=own | {"ADMIN_KEY": "nonsense"})
    assert wrong.returncode == 1
    assert "start_session: HTTP 401" in wrong.stderr


def test_faq_every_step_has_new_weights_and_the_next_request_is_answered_by_them(gateway: Gateway) -> None:
    own = {"ADMIN_KEY": ADMIN, "SESSIONS": str(BATCH), "TASK": "faq", "MAX_TOKENS": "4"}
    step = gateway.trained()
    assert typed(f"bash scripts/sample_batch.sh {gateway.url}", env=own).returncode == 0
    version = int(str(gateway.run.line("train", step=step)["version"]))
    started = gateway.start("newest")
    gateway.chat(started.body["api_key"])
    gateway.end(started.body["api_key"])
    assert min(gateway.versions(started.body["session_id"])) >= version


def script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_faq_openclaw_keeps_one_key_over_many_sessions(gateway: Gateway) -> None:
    """The helper scripts, and the demo that plays several episodes under one key."""
    wrong = script("start_session.py", gateway.url, "--admin-key", "nonsense")
    assert wrong.returncode == 1
    assert "Invalid API key" in wrong.stderr
    started = script("start_session.py", gateway.url, "--admin-key", ADMIN, "--task-id", "claw")
    assert started.returncode == 0, started.stderr
    facts = dict(line.split("=", 1) for line in started.stderr.splitlines())
    assert facts["SESSION_API_KEY"].startswith("sk-sess-")
    assert facts["SESSION_ID"] == "claw"
    too_early = script("set_reward.py", gateway.url, "--api-key", facts["SESSION_API_KEY"], "--reward", "1.0")
    assert too_early.returncode == 1, "there is no answer to reward yet"
    assert gateway.chat(facts["SESSION_API_KEY"]).status == 200
    rewarded = script("set_reward.py", gateway.url, "--api-key", facts["SESSION_API_KEY"], "--reward", "1.0")
    assert rewarded.returncode == 0, rewarded.stderr
    refresh = ("--admin-key", ADMIN, "--task-id", "claw", "--api-key", facts["SESSION_API_KEY"])
    refreshed = script("start_session.py", gateway.url, *refresh)
    assert refreshed.returncode == 0, refreshed.stderr
    assert dict(line.split("=", 1) for line in refreshed.stderr.splitlines()) == facts | {"SESSION_ID": "claw-1"}
    exported = gateway.post("/rl/export_trajectories", {"session_id": "claw"}, ADMIN).body
    assert [one["reward"] for one in exported["interactions"]] == [1.0], "the old session has ended, with its reward"
    assert gateway.end(facts["SESSION_API_KEY"]).status == 200
    arguments = [gateway.url, "--admin-key", ADMIN, "--episodes", "4", "--max-tokens", "8"]
    played = script("demo_lifecycle.py", *arguments)
    assert played.returncode == 0, played.stderr
    assert played.stdout.count("answer: ") == 4


def test_the_reference_lists_what_the_gateway_serves(gateway: Gateway) -> None:
    started = gateway.start("my-task-0", api_key=None)
    assert (started.status, started.body["session_id"]) == (200, "my-task-0")
    health = requests.get(f"{gateway.url}/health", timeout=60).json()
    assert (health["status"], health["workers"]) == ("ok", 1)
    key = started.body["api_key"]
    said = gateway.post("/responses", {"model": "default", "input": "3+4=", "max_output_tokens": 4}, key)
    assert (said.status, said.body["object"]) == (200, "response")
    body = {"model": "default", "messages": [{"role": "user", "content": "3+4="}], "max_tokens": 4}
    said = gateway.post("/v1/messages", body, key)
    assert (said.status, said.body["type"]) == (200, "message")
    assert gateway.post("/rl/set_reward", {"reward": 1.0, "interaction_id": None}, key).status == 200
    assert gateway.end(key).body["interaction_count"] == 2
    exported = gateway.post("/rl/export_trajectories", {"session_id": "my-task-0"}, ADMIN).body["interactions"]
    for one in exported:  # token ids and log-probs were recorded by themselves
        assert len(one["output_ids"]) == len(one["logprobs"]) == len(one["versions"]) > 0


@pytest.mark.parametrize("path", ["/rl/start_session", "/rl/export_trajectories"])
def test_the_admin_key_opens_the_admin_calls_and_a_session_key_does_not(gateway: Gateway, path: str) -> None:
    key = gateway.key("layers")
    refused = gateway.post(path, {"task_id": "x", "session_id": "layers"}, key)
    assert refused.status == 403, refused.body
    assert "admin key" in refused.error
    assert gateway.post("/chat/completions", {"messages": []}, ADMIN).status in (401, 403)
    assert gateway.end(key).status == 200


def test_error_401_missing_invalid_and_ended_keys_say_to_check_the_key(gateway: Gateway) -> None:
    key = gateway.key("ended")
    gateway.end(key)
    for bad in (None, "", "sk-sess-xxxxxxxxxxxx", key):
        refused = gateway.chat(bad)
        assert refused.status == 401, refused.body
        assert "key" in refused.error
    assert "Invalid API key" in gateway.chat("sk-sess-xxxxxxxxxxxx").error
    assert gateway.start("x").status == 200
    assert gateway.post("/rl/start_session", {"task_id": "x"}, None).status == 401


def test_error_429_no_capacity_and_409_a_key_that_is_being_refreshed(gateway: Gateway) -> None:
    """All slots are taken: a new session hears 429 and when to come back; of two refreshes of a key one waits, the other hears 409."""
    keys = []
    while (started := gateway.start("full")).status == 200:
        keys.append(started.body["api_key"])
    assert started.status == 429
    assert int(started.headers["retry-after"]) >= 1
    assert "no free slot" in started.error
    assert "retry in" in started.error
    assert len(keys) <= (LAG + 1) * BATCH
    assert gateway.chat(keys[0]).status == 200, "a session that runs is never refused"
    with ThreadPoolExecutor() as pool:
        both = {pool.submit(gateway.start, "full", api_key=keys[0]) for _ in range(2)}
        first, waiting = wait(both, timeout=110, return_when=FIRST_COMPLETED)
        for key in keys[1:]:  # training catches up, and slots open
            gateway.chat(key)
            gateway.end(key)
        [refused], [waited] = [one.result() for one in first], [one.result() for one in waiting]
    assert (refused.status, refused.headers["x-should-retry"]) == (409, "false")
    assert "refresh" in refused.error
    assert waited.status == 200, waited.body
    assert waited.body["api_key"] == keys[0]
    gateway.end(keys[0])


def test_the_configuration_table_has_the_defaults_that_it_prints(tmp_path: Path) -> None:
    agent = AgentConfig()
    printed = ("inline", "areal-admin-key", 3600, 1.0, "individual")
    assert (
        agent.mode,
        agent.admin_api_key,
        agent.session_timeout_seconds,
        agent.turn_discount,
        agent.export_style,
    ) == printed
    assert (agent.refresh_timeout_seconds, agent.gateway_port) == (120, 8090)
    (tmp_path / "reference.yaml").write_text(REFERENCE)
    assert resolve(tmp_path / "reference.yaml").config.rollout.agent == AgentConfig(mode="online")


def test_its_limits_are_said_in_its_own_words() -> None:
    [said] = why_not(resolve(None, ["actor.path=tiny-qwen3", "rollout.agent.mode=online", "scheduler.type=ray"]).config)
    assert "online mode needs the local or slurm scheduler" in said


def test_error_502_an_unreachable_worker_and_the_run_says_what_died_and_begins_again(gateway: Gateway) -> None:
    """Last, because it ends the service: the worker dies while the controller cannot notice it yet."""
    key = gateway.key("orphan")
    assert gateway.trained() > 0
    tree = psutil.Process(gateway.run.process.pid).children(recursive=True)
    worker = next(one for one in tree if "areal.rollout.worker" in one.cmdline())
    controller = worker.parent()
    assert controller is not None
    controller.send_signal(signal.SIGSTOP)
    try:
        worker.kill()
        refused = gateway.chat(key)
        assert refused.status == 502, refused.body
        assert "check" in refused.error
        assert "run" in refused.error
    finally:
        controller.send_signal(signal.SIGCONT)
    before, _, _ = gateway.run.text("The run begins again from its last recovery state: 1 of 3").partition(
        "begins again"
    )
    assert f"worker-0 (pid {worker.pid}) was killed by signal 9" in before
    wait_for(lambda: READY in gateway.run.log.read_text().partition("begins again")[2], "its next life")
    assert gateway.chat(key).status == 200, "under the same key, where it was"
    tree += controller.children(recursive=True)
    controller.send_signal(signal.SIGTERM)
    assert gateway.run.end() == 0
    folder = gateway.run.log.parent.parent
    assert balanced(folder).state == "stopped"
    table = read_metrics(folder / "logs" / "metrics.jsonl")
    assert len(table.series("train/loss").values) == balanced(folder).steps
    gone = script("set_reward.py", gateway.url, "--api-key", key)
    assert gone.returncode == 1
    assert situation("gateway-unreachable").said_in(gone.stderr)
    assert not [one for one in tree if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    assert (folder / "store.sqlite").exists()
