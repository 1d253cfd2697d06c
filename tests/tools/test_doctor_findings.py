"""What the doctor says of what it found, on hand-made sessions; and that no reason is without advice and none undocumented."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from areal.base.types import BranchReason, Fork, Message, Tool, ToolCall
from areal.cluster.program import Ended
from areal.cluster.run_folder import RunFolder
from areal.doctor import _for_one_agent, parse
from areal.proxy.export import MASK_ORDER
from areal.proxy.statistics import OF_ITS_OWN
from areal.store.base import SessionSummary
from areal.tools.doctor import findings
from areal.tools.doctor.advice import DROPPED, FORKED, MASKED, client_advice
from areal.tools.doctor.diagnosis import Diagnosis, _session
from areal.tools.doctor.findings import Finding, Requests, Setting, judge
from areal.tools.doctor.report import Report, as_text
from tests.proxy.test_export import SESSION, turn

PAGE = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text("utf-8")
RUN = Ended(0, 1.0, False, 0)
SETTING = Setting("http://127.0.0.1:1", "model", True, "individual", 32, 1, "session", "client", False, 300.0)
SEEN = Requests({("chat", 200): 3})


def found(*turns: object, fate: str = "accepted", drop: str = "", task: str = "t", agent: str = "") -> Diagnosis:
    tags = {"user_agent": agent} if agent else {}
    session = replace(SESSION, task_id=task, tags=tags)
    return Diagnosis((_session(SessionSummary(session, 0, None, fate, drop), turns, 1.0),))  # type: ignore[arg-type]


def named(every: tuple[Finding, ...]) -> dict[str, Finding]:
    return {one.name: one for one in every}


def test_every_tag_and_every_reason_has_its_advice() -> None:
    assert {*MASK_ORDER, "stale"} <= set(MASKED)
    assert set(get_args(BranchReason)) - OF_ITS_OWN <= set(FORKED)
    assert all(text for table in (MASKED, DROPPED, FORKED) for text in table.values())


def test_every_finding_and_every_flag_is_documented() -> None:
    source = Path(findings.__file__).read_text("utf-8")
    names = set(re.findall(r'Finding\(\s*f?"([\w:{}]+)"', source))
    assert len(names) > 12
    documented = {re.sub(r"\{\w+\}", "REASON", name).replace("REASON:REASON", "masked:REASON") for name in names}
    assert [name for name in sorted(documented) if f"| `{name}` |" not in PAGE] == []
    for flag in ("--agent", "--script", "--config", "--session", "--timeout", "--port", "--json", "--output-dir"):
        assert f"`{flag}" in PAGE, flag


def test_a_good_run_has_no_finding_but_a_hint_at_concat() -> None:
    good = found(turn(0, [1], [2]), turn(1, [1, 2, 3], [4], token=0, credit=0, reward=1.0))
    assert [one.name for one in judge(good, RUN, SEEN, SETTING)] == ["style"]
    assert judge(good, RUN, SEEN, replace(SETTING, style="concat")) == ()


def test_the_worst_stands_first() -> None:
    bad = found(turn(0, [1], [2], tags=("greedy",)), replace(turn(1, [9], [4]), fork=Fork("context_moved")))
    said = judge(bad, replace(RUN, left_running=2), SEEN, SETTING)
    assert [one.severity for one in said] == sorted((one.severity for one in said), key=("loss", "cost", "note").index)
    assert {"no_reward", "masked:greedy", "fork:context_moved", "agent_left_processes"} <= set(named(said))


def test_masks_on_purpose_are_no_loss() -> None:
    side = found(turn(0, [1], [2], reward=1.0), turn(1, [8], [4], tags=("side_request",)))
    assert named(judge(side, RUN, SEEN, SETTING))["masked:side_request"].severity == "note"


def test_a_verifier_that_rewards_later_is_no_loss() -> None:
    said = named(judge(found(turn(0, [1], [2])), RUN, SEEN, replace(SETTING, reward_key="admin")))
    assert said["no_reward"].severity == "note"


def test_where_the_run_rewards_by_itself_the_agent_need_not() -> None:
    said = named(judge(found(turn(0, [1], [2])), RUN, SEEN, replace(SETTING, reward_source="judge_model")))
    assert said.keys() == {"rewarded_by_the_run"}
    assert said["rewarded_by_the_run"].severity == "note"
    assert "reward_source=judge_model" in said["rewarded_by_the_run"].text


def test_conversations_without_a_name_and_full_sessions_are_told() -> None:
    one = found(turn(0, [1], [2], reward=1.0), task="conversation-abc", agent="curl/8")
    two = Diagnosis((*one.sessions, *one.sessions))
    assert one.sessions[0].opened_by == "conversation"
    assert "X-Session-Id" in named(judge(two, RUN, SEEN, SETTING))["sessions_split"].advice
    assert "sessions_split" not in named(judge(one, RUN, SEEN, SETTING))
    assert "tries_apart" in named(judge(one, RUN, SEEN, replace(SETTING, n_samples=4)))
    assert "session_full" in named(judge(one, RUN, SEEN, replace(SETTING, max_turns=1)))


def test_what_names_no_session_is_rewarded_by_the_id_of_an_answer() -> None:
    nameless = found(turn(0, [1], [2]), task="conversation-abc", agent="curl/8")
    advice = named(judge(nameless, RUN, SEEN, SETTING))["no_reward"].advice
    assert ('"interaction_id"' in advice, "x-session-id" in advice) == (True, False)


def test_tool_calls_that_could_not_be_read_are_counted() -> None:
    tools = (Tool("add"),)
    broken = replace(
        turn(0, [1], [2]), tools=tools, reply=Message("assistant", "", tool_calls=(ToolCall("c", "add", "{'a"),))
    )
    unread = replace(turn(1, [1, 2, 3], [4], reward=1.0), tools=tools, reply=Message("assistant", "<tool_call>{oops"))
    fine = replace(turn(2, [7], [4]), tools=tools, reply=Message("assistant", "no call"))
    tools_found = found(broken, unread, fine).tools
    assert (tools_found.offered, tools_found.parsed, tools_found.malformed, tools_found.unread) == (3, 1, 1, 1)
    assert (
        "of 2 tool calls 1 had" in named(judge(found(broken, unread), RUN, SEEN, SETTING))["tool_calls_malformed"].text
    )
    assert "tools_not_called" in named(judge(found(fine), RUN, SEEN, SETTING))


@pytest.mark.parametrize(
    ("answers", "name", "advice"),
    [
        ({}, "no_request", "OPENAI_BASE_URL"),
        ({("unknown", 404): 2}, "no_call", "/v1/chat/completions"),
        ({("chat", 401): 1}, "no_call", "OPENAI_API_KEY"),
        ({("models", 200): 1}, "no_call", "gateway.log"),
    ],
)
def test_no_call_says_what_came_instead(answers: dict[tuple[str, int], int], name: str, advice: str) -> None:
    said = named(judge(Diagnosis(()), RUN, Requests(answers), SETTING))
    assert advice in said[name].advice
    assert said[name].severity == "loss"


def test_what_is_known_of_a_client_is_said_of_its_branches() -> None:
    billing = Fork(
        "system_changed", before="x-anthropic-billing-header: cc_version=2.1.", recorded="332.ed3", requested="332.a01"
    )
    assert "CLAUDE_CODE_ATTRIBUTION_HEADER=0" in client_advice("", billing)
    assert "DISABLE_PROMPT_CACHING" in client_advice("claude-cli/2.1.332 (external, sdk-cli)", Fork("history_changed"))
    assert client_advice("OpenAI/Python 3", Fork("history_changed")) == ""
    lost = found(turn(0, [1], [2], reward=1.0), replace(turn(1, [9], [4]), fork=billing))
    advice = named(judge(lost, RUN, SEEN, SETTING))["fork:system_changed"].advice
    assert "CLAUDE_CODE_ATTRIBUTION_HEADER=0" in advice
    assert FORKED["system_changed"] in advice


def test_the_text_is_plain_and_tells_every_fork_once() -> None:
    fork = Fork("answer_changed", "message 1 (assistant) differs", "i0", 7, "user\n", "\x1b[31mred", "blue")
    bad = found(turn(0, [1], [2], reward=1.0), replace(turn(1, [9], [4]), fork=fork))
    text = as_text(Report(bad, "agent", RUN, judge(bad, RUN, SEEN, SETTING), "a script", "concat", 8))
    assert "  turn 1 of t-0: answer_changed, message 1 (assistant) differs\n" in text
    assert '    token 7, after "user\\n"\n' in text
    assert "\x1b" not in text  # what a model wrote cannot steer a terminal
    assert text.endswith("trainable as it is\n")


def test_a_command_line_is_read_once() -> None:
    command = parse(["--agent", "python a.py", "--timeout", "5", "gconfig.n_samples=4"])
    assert (command.agent, command.timeout_s, command.config.gconfig.n_samples) == ("python a.py", 5.0, 4)
    assert (command.script, command.session, command.json, command.output_dir) == (None, None, False, None)


def test_a_configuration_that_starts_agents_itself_is_examined_with_the_one_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    words = ["--agent", "python agent.py", "--config", "examples/claude_code/config.yaml"]
    config = _for_one_agent(parse(words), RunFolder.of(str(tmp_path), "e", "t", str(tmp_path), None))
    assert (config.rollout.agent.framework, config.train_dataset.path) == (None, None)
    assert (config.rollout.agent.internal_token or "").startswith("sk-doctor-")
