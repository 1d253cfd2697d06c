"""The official SDKs and Claude Code against a real model: smollm2-135m, 8,192 tokens of context, a template with tools given by
`rollout.agent.chat_template`. What it says is its own affair; what is recorded of it must be exact."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.clients import command_lines
from tests.clients.installs import CLAUDE_CODE, PYTHON_AGENTS, Agents
from tests.clients.live_run import Record, Run, agent_home, live_run, run_agent
from tests.clients.rows import check_tokens
from tests.clients.tap import Tap

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(1500)]
HERE = Path(__file__).parent
DIALECTS = ("chat", "responses", "messages")


@pytest.fixture(scope="module")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    overrides = [
        "actor.path=smollm2-135m",
        "rollout.native.max_context=8192",
        "rollout.native.kv_tokens=16384",
        f"rollout.agent.chat_template={HERE / 'templates' / 'chatml_tools.jinja'}",
    ]
    with live_run(tmp_path_factory.mktemp("real"), overrides) as run:
        yield run


def check_real(record: Record) -> None:
    """Whole and exact, on one version of the weights."""
    check_tokens(record, None)
    for one in record.interactions:
        assert one["output_ids"]
        assert all(value is not None and value <= 0 for value in one["logprobs"])
        assert len(set(one["versions"])) == 1


def test_the_sdks_talk_with_a_real_model(real_run: Run, installed: Callable[[Agents], Path]) -> None:
    python = installed(PYTHON_AGENTS) / "bin" / "python"
    sessions = {dialect: real_run.start(f"real {dialect}") for dialect in DIALECTS}
    with Tap(real_run.url) as tap, agent_home() as home:
        lines = [{"dialect": name, "base_url": tap.url, "api_key": session.key} for name, session in sessions.items()]
        stdin = "".join(json.dumps(line) + "\n" for line in lines)
        done = run_agent([python, HERE / "programs" / "sdk_talk.py"], home=home, stdin=stdin)
    assert done.code == 0, done.explain()
    assert [json.loads(line)["turns"] for line in done.stdout.splitlines()] == [4, 4, 4]
    assert [call.status for call in tap.model_calls] == [200] * 6
    assert all(call.body["stream"] for call in tap.model_calls)
    for session in sessions.values():
        record = session.end()
        check_real(record)
        assert [len(record.interactions), len(record.rows)] == [2, 1]
        assert record.summary["merge_rate"] == 1.0


def test_claude_code_works_with_a_real_model(real_run: Run, installed: Callable[[Agents], Path]) -> None:
    session = real_run.start("real claude")
    limits = {"CLAUDE_CODE_MAX_CONTEXT_TOKENS": "8192", "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "1024"}
    with Tap(real_run.url) as tap, agent_home() as home:
        line = command_lines.claude_code(
            installed(CLAUDE_CODE), "Say hello in one word.", tap.url, session.key, "--bare", trusted=False, **limits
        )
        done = line.run(home)
    assert tap.model_calls, done.explain()
    assert {call.status for call in tap.model_calls} == {200}, done.explain()
    record = session.end()
    cut = any(one["finish_reason"] == "length" for one in record.interactions)  # then it asks for more, and gives up
    assert done.code == 0 or cut, done.explain()
    check_real(record)
    first = record.interactions[0]
    assert 500 < len(first["prompt_ids"]) < 4096
    assert [tool["name"] for tool in first["tools"]] == ["Bash", "Edit", "Read"]
