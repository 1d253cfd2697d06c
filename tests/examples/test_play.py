"""examples/play.py: any agent object against a running service; its rewards, its groups, and how it stops."""

from __future__ import annotations

from pathlib import Path

from tests.examples.service import run

MATH = ("examples.math_agent.agent:MathAgent", "examples.math_agent.agent:sums")


class Broken:
    """An agent with a bug."""

    async def run(self, task: object, *, base_url: str, api_key: str) -> float:
        raise KeyError("no such field")


def test_groups_of_samples_with_a_reward_per_answer(tmp_path: Path) -> None:
    script = [{"pieces": ["no idea", "<|im_end|>"]}, {"pieces": ["still", "<|im_end|>"]}]
    overrides = ("gconfig.n_samples=3", "evaluator.path=null", "evaluator.agent=null", "rollout.agent.reward_key=admin")
    with run(tmp_path, "math_agent/config.yaml", *overrides, script=script) as service:
        flags = ("--samples", "3", "--groups", "2", "--limit", "2", "--seed", "5")
        played = service.play(*MATH, *flags)
        assert (played.returncode, played.stdout) == (0, "played 2 tasks\n"), played.stderr
        sessions = service.sessions()
        assert sorted(summary.session.task_id for summary, _ in sessions) == ["sum-5-0"] * 3 + ["sum-5-1"] * 3
        assert len({summary.session.group_id for summary, _ in sessions}) == 2
        for summary, recorded in sessions:
            assert summary.session.ending == "ended"
            turns = 1 if summary.session.task_id == "sum-5-0" else 2
            assert [one.reward for one in recorded] == ([0.1] if turns == 1 else [0.05, 0.1])
        refused = service.play(*MATH, "--admin-key", "nonsense", "--limit", "1")
        assert refused.returncode == 1
        assert "played 0 tasks" in refused.stdout
        assert "Invalid API key" in refused.stderr
        broken = service.play("tests.examples.test_play:Broken", MATH[1], "--limit", "1")
        assert broken.returncode == 1
        assert broken.stderr == "stopped: KeyError: 'no such field'\n"
