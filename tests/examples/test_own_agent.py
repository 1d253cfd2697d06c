"""examples/own_agent as its README says: an OpenAI client with a tool, streamed, and the four calls around it."""

from __future__ import annotations

import random
from pathlib import Path

from tests.examples.service import EXAMPLES, calls, run

AGENT = str(EXAMPLES / "own_agent" / "agent.py")


def test_an_episode_with_a_tool_is_one_conversation_and_rewarded(tmp_path: Path) -> None:
    dice = random.Random(1)
    x, y = dice.randint(2, 20), dice.randint(2, 20)  # what its first episode asks
    script = [
        {"pieces": ["Let me add. ", calls("add", x=x), "<|im_end|>"]},  # a call that makes no sense
        {"pieces": [calls("add", x=x, y=y), calls("add", x=1, y=1), "<|im_end|>"]},  # two at once
        {"pieces": ["It is ", str(x + y), "<|im_end|>"]},
    ]
    with run(tmp_path, "own_agent/config.yaml", script=script) as service:
        wrong = service.run(AGENT, service.url, "--admin-key", "nonsense")
        assert wrong.returncode == 1
        assert "Invalid API key" in wrong.stderr
        played = service.run(AGENT, service.url, "--episodes", "1")
        assert played.returncode == 0, played.stderr
        assert played.stdout.splitlines() == [
            "Let me add.",
            "",
            f"It is {x + y}",
            f"episode 0: {x} + {y}, reward 1",
        ]
        [(summary, recorded)] = service.sessions()
        assert (summary.session.task_id, summary.session.ending, summary.reward) == (f"{x}+{y}", "ended", 1.0)
        first, second, third = recorded
        assert (first.token_parent, second.token_parent, third.token_parent) == (None, first.id, second.id)
        assert [message.content for message in third.messages if message.role == "tool"] == [
            "error: add needs x and y, two numbers ('y')",
            str(x + y),
            "2",
        ]
        service.stop()
        gone = service.run(AGENT, service.url)
        assert gone.returncode == 1
        assert "does not answer any more" in gone.stderr


def test_a_run_that_nobody_comes_to_waits_and_has_not_failed(tmp_path: Path) -> None:
    with run(tmp_path, "own_agent/config.yaml", "actor.path=tiny-qwen3", "agent.framework=openclaw") as service:
        service.stop()
        log = (service.folder / "logs" / "train.log").read_text()
        assert log.count(f"waiting for agents at {service.url}/v1") == 1


def test_it_trains_the_model_behind_it(tmp_path: Path) -> None:
    overrides = ("actor.path=tiny-qwen3", "total_train_steps=1", "rollout.native.kv_tokens=8192")
    with run(tmp_path, "own_agent/config.yaml", *overrides) as service:
        played = service.run(AGENT, service.url, "--episodes", "8")
        assert played.returncode == 0, played.stderr
        assert "[train] step=0 updated=8 loss=" in service.wait()
