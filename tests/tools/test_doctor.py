"""`areal doctor` as a user runs it: real agents, a real gateway, worker and scripted server, and what the report says."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from areal.doctor import main

ROOT = Path(__file__).parents[2]
STRIPPING = ROOT / "tests" / "chat" / "templates" / "thinking_stripped.jinja"

START = """
import os, sys, urllib.request, json
from openai import OpenAI
client = OpenAI(max_retries=0, default_headers={"x-session-id": "lesson"})
talk = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "hello"}]
def ask(**more):
    said = client.chat.completions.create(model="default", messages=talk, **more).choices[0].message
    print("got", said.content)
    return said
def reward(value, **headers):
    body = json.dumps({"reward": value}).encode()
    sent = {"authorization": "Bearer " + os.environ["AREAL_API_KEY"], "x-session-id": "lesson", **headers}
    urllib.request.urlopen(urllib.request.Request(os.environ["AREAL_BASE_URL"] + "/rl/set_reward", body, sent)).read()
def go_on(said, text):
    talk.extend([{"role": "assistant", "content": said.content}, {"role": "user", "content": text}])
"""
APPENDS = START + "for k in range(3): go_on(ask(), f'more {k}')\nreward(1.0)\n"
EDITS = START + (
    "for k in range(3):\n    talk[0]['content'] = f'Be terse. It is {k} o\\'clock.'\n    go_on(ask(), 'more')\nreward(0.5)\n"
)
NEVER_REWARDS = START + "go_on(ask(), 'more')\nask()\n"
CRASHES = START + "go_on(ask(temperature=0), 'more')\nask()\nreward(1.0)\nsys.exit(3)\n"
IGNORES = "print('I talk to nobody')\n"
HANGS = """
import json, os, subprocess, sys, time, urllib.request
sent = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "x-session-id": "lesson"}
body = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, sent)).read()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(4711)", sys.argv[0]], start_new_session=True)
print("waiting")
time.sleep(3600)
"""
WRONG_KEY = START + "client.api_key = 'sk-wrong-key-0815'\nask()\n"


@dataclass
class Done:
    code: int
    report: Any
    out: str
    shown: str

    def finding(self, name: str) -> dict[str, str]:
        [found] = [one for one in self.report["findings"] if one["name"] == name]
        return dict(found)


def command(folder: Path, program: str, *words: str) -> list[str]:
    script = folder / "agent.py"
    script.write_text(program)
    agent = f"{sys.executable} {script}"
    return [sys.executable, "-m", "areal.doctor", "--agent", agent, *words]


def environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "ANTHROPIC_"))}
    return kept | {"XDG_STATE_HOME": str(folder / "state"), "TMPDIR": str(folder), "HTTP_PROXY": "http://127.0.0.1:9"}


def doctor(folder: Path, program: str, *words: str) -> Done:
    done = subprocess.run(
        command(folder, program, "--json", *words),
        cwd=ROOT, env=environment(folder), capture_output=True, text=True, timeout=480,
    )  # fmt: skip
    assert "Traceback" not in done.stderr.replace("agent | Traceback", ""), done.stderr
    report = json.loads(done.stdout) if done.stdout else None
    return Done(done.returncode, report, done.stdout, done.stderr)


def alive(mark: str) -> list[str]:
    """Command lines of living processes that hold this text."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if mark in line:
            found.append(line)
    return found


def test_an_agent_that_only_adds_is_trainable(tmp_path: Path) -> None:
    done = doctor(tmp_path, APPENDS)
    assert (done.code, done.report["trainable"]) == (0, True), done.shown
    assert (done.report["calls"], done.report["dialects"]) == (3, ["openai_chat"])
    assert (done.report["mergeable"], done.report["merged"], done.report["merge_rate"]) == (2, 2, 1.0)
    assert (done.report["forks"], done.report["rewards_set"], done.report["reward_sum"]) == ([], 1, 1.0)
    tokens = done.report["tokens"]
    assert tokens["recorded"] == tokens["trained"] > 0
    assert (tokens["masked"], tokens["dropped"]) == ({}, {})
    assert done.report["rows"]["individual"]["rows"] == 3
    assert done.report["rows"]["concat"]["rows"] == 1
    [session] = done.report["sessions"]
    assert (session["session_id"], session["opened_by"]) == ("hint-lesson", "hint")
    assert session["user_agent"].startswith("OpenAI/Python")
    assert done.report["agent"]["exit_code"] == 0
    assert "agent | got I see.\n" in done.shown  # what it prints is shown, and not on standard output
    assert not alive(str(tmp_path))
    assert not list(tmp_path.glob("areal-doctor-*"))


def test_an_agent_that_edits_history_hears_where_and_what_to_change(tmp_path: Path) -> None:
    done = doctor(tmp_path, EDITS)
    assert done.code == 0  # every token is trained, in more rows
    assert (done.report["merge_rate"], len(done.report["forks"])) == (0.0, 2)
    first, second = done.report["forks"]
    assert (first["reason"], first["index"], first["lost"]) == ("system_changed", 1, True)
    assert first["before"].endswith("It is ")
    assert (first["recorded"][:2], first["requested"][:2]) == ("0 ", "1 ")
    assert second["position"] == first["position"]
    found = done.finding("fork:system_changed")
    assert found["severity"] == "cost"
    assert "newest user turn" in found["advice"]


def test_an_agent_that_never_rewards_loses_its_tokens(tmp_path: Path) -> None:
    done = doctor(tmp_path, NEVER_REWARDS)
    assert (done.code, done.report["rewards_set"]) == (1, 0)
    tokens = done.report["tokens"]
    assert tokens["dropped"] == {"expired": tokens["recorded"]}
    assert tokens["trained"] == 0
    advice = done.finding("no_reward")["advice"]
    assert "/rl/set_reward" in advice
    assert ('"interaction_id"' in advice, "x-session-id" in advice) == (False, True)
    assert done.finding("dropped:expired")["severity"] == "loss"


def test_an_agent_that_crashes_is_told_with_its_exit_code(tmp_path: Path) -> None:
    done = doctor(tmp_path, CRASHES, "gconfig.n_samples=4")
    assert (done.code, done.report["agent"]["exit_code"], done.report["calls"]) == (1, 3, 2)
    assert done.finding("agent_failed")["text"] == "the agent exited with code 3"
    assert "--script FILE" in done.finding("agent_failed")["advice"]  # it may have wanted another answer
    assert "rollout.agent.sampling=policy" in done.finding("masked:greedy")["advice"]
    assert "start_session" in done.finding("tries_apart")["advice"]
    tokens = done.report["tokens"]
    assert tokens["recorded"] == tokens["trained"] + tokens["masked"]["greedy"]


def test_an_agent_that_ignores_the_base_url_hears_which_to_use(tmp_path: Path) -> None:
    done = doctor(tmp_path, IGNORES)
    assert (done.code, done.report["sessions"], done.report["calls"]) == (1, [], 0)
    assert "OPENAI_BASE_URL (http://127.0.0.1:" in done.finding("no_request")["advice"]
    assert "agent | I talk to nobody" in done.shown


def test_an_agent_that_hangs_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    done = doctor(tmp_path, HANGS, "--timeout", "20")
    assert (done.code, done.report["agent"]["timed_out"], done.report["calls"]) == (1, True, 1), done.shown
    assert done.report["tokens"]["dropped"] == {"expired": done.report["tokens"]["recorded"]}
    assert done.finding("agent_timeout")["severity"] == "loss"
    assert not alive(str(tmp_path))


def test_a_wrong_key_is_named(tmp_path: Path) -> None:
    done = doctor(tmp_path, WRONG_KEY)
    assert done.code == 1
    found = done.finding("no_call")
    assert "1 × 401" in found["text"]
    assert "OPENAI_API_KEY" in found["advice"]


def model_folder(folder: Path) -> Path:
    """A model as far as a script needs one: tokenizer and template, no weights."""
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({sign: k for k, sign in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    tokenizer.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens(
        [tokenizers.AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>")]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|endoftext|>", "chat_template": STRIPPING.read_text("utf-8")}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_script_in_a_models_own_tokens_and_template(tmp_path: Path) -> None:
    model, script = model_folder(tmp_path / "model"), tmp_path / "answers.jsonl"
    pieces = ["<think>", "\nadd\n", "</think>", "\n\nSo ", {"hex": "c3"}, {"hex": "a9"}, ".", "<|im_end|>"]
    script.write_text(json.dumps({"pieces": pieces}) + "\n")
    done = doctor(
        tmp_path, APPENDS, "--script", str(script), f"actor.path={model}", "--output-dir", str(tmp_path / "kept")
    )
    assert done.code == 0, done.shown
    assert "agent | got So é." in done.shown
    assert [fork["reason"] for fork in done.report["forks"]] == ["reasoning_stripped"] * 2
    assert "add" in done.report["forks"][0]["recorded"]
    assert done.report["answered_by"] == f"the script {script}, in the tokens and the template of {model}"
    spoken = (
        len(b"\nadd\n\n\nSo \xc3\xa9.") + 3
    )  # a byte is a token here; both think tags, and the template's end of turn
    assert done.report["tokens"]["recorded"] == 3 * spoken
    assert (tmp_path / "kept" / "store.sqlite").is_file()
    again = doctor(tmp_path, APPENDS, "--output-dir", str(tmp_path / "kept"))
    assert (again.code, again.out) == (2, "")
    assert "holds a run already" in again.shown


TOOLS = (
    START
    + """
import anthropic
tool = {"name": "add", "input_schema": {"type": "object", "properties": {}}}
from openai import OpenAI
with anthropic.Anthropic(max_retries=0) as other:
    asked = [{"role": "user", "content": "sum?"}]
    said = other.messages.create(model="default", max_tokens=99, messages=asked, tools=[tool])
    asked += [{"role": "assistant", "content": said.content}, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": said.content[0].id, "content": "3"}]}]
    said = other.messages.create(model="default", max_tokens=99, messages=asked, tools=[tool])
reward(1.0)
"""
)


def test_a_session_of_its_own_tool_calls_and_the_text_report(tmp_path: Path) -> None:
    script = tmp_path / "answers.jsonl"
    lines = [
        {"when": "tool_response", "pieces": ["It is 3.", "<|im_end|>"]},
        {"pieces": ['<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "<|im_end|>"]},
    ]
    script.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = command(tmp_path, TOOLS, "--script", str(script), "--session", "sum-1")
    done = subprocess.run(words, cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stderr
    lines_of = {line[:12].strip(): line[12:] for line in done.stdout.splitlines() if line[:1].strip()}
    assert lines_of["sessions"] == "1: sum-1 (by start_session, accepted)"
    assert lines_of["calls"] == "2 in Anthropic Messages"
    assert lines_of["merge rate"].startswith("1.00: 1 of 1 turns")
    assert (lines_of["forks"], lines_of["tool calls"]) == ("none", "1 read, 0 of them malformed, 0 unread")
    assert lines_of["tokens"] == "recorded 4 = trained 4 + masked 0 + dropped 0"
    assert done.stdout.splitlines()[-1] == "trainable as it is"
    assert "sk-sess-" not in done.stdout + done.stderr


def test_the_report_of_the_page_is_what_its_agent_gets(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "doctor.md").read_text("utf-8")
    (tmp_path / "agent.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    shown = "areal doctor: " + page.partition("```\nareal doctor: ")[2].partition("```")[0]
    known = environment(tmp_path) | {
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        [sys.executable, "-m", "areal.doctor", "--agent", "python agent.py", "rollout.agent.export_style=concat"],
        cwd=tmp_path, env=known, capture_output=True, text=True, timeout=480,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seconds = re.compile(r"after [\d.]+ s$", re.MULTILINE)
    assert seconds.sub("after", done.stdout) == seconds.sub("after", shown)


def test_a_signal_leaves_nothing_behind(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(tmp_path, HANGS), cwd=ROOT, env=environment(tmp_path), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    assert process.stderr is not None
    assert any("agent | waiting" in line for line in process.stderr)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=400)
    assert (process.returncode, output) == (130, ""), errors
    assert "Traceback" not in errors
    deadline = time.monotonic() + 200
    while alive(str(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(str(tmp_path))
    assert not list(tmp_path.glob("areal-doctor-*"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--agent"),
        (("--agent", " "), "--agent is empty"),
        (("--agent", "true", "--timeout", "0"), "--timeout is 0"),
        (("--agent", "true", "--turns=3"), "unknown flag --turns"),
        (("--agent", "true", "actor.pth=x"), "actor.path"),
        (("--agent", "true", "actor.path=/nowhere"), "there is no model '/nowhere'"),
        (("--agent", "true", "--script", "/nowhere.jsonl"), "/nowhere.jsonl"),
    ],
)
def test_a_wrong_command_line_is_exit_2_with_a_sentence(
    words: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with pytest.raises(SystemExit) as end:  # argparse ends the process itself
        sys.exit(main(words))
    told = capsys.readouterr()
    assert (end.value.code, told.out) == (2, "")
    assert said in told.err
