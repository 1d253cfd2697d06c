"""mode subproc in a whole run: a plain agent whose process dies, hangs or raises costs its own session, and the rest goes on."""

from __future__ import annotations

import json
import time
from pathlib import Path

from tests.examples.service import run

DOES = ("work", "raise", "die", "hang")


def test_a_killed_or_hung_process_is_a_failed_session_and_the_others_are_rewarded(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"task_id": does, "does": does}) + "\n" for does in DOES))
    overrides = [
        "rollout.agent.mode=subproc",
        "rollout.agent.path=tests.rollout.plain_agent:PlainAgent",
        "rollout.agent.process.timeout_seconds=4",
        "rollout.agent.process.max_running=2",
        f"train_dataset.path={tasks}",
    ]
    script = [{"pieces": ["Hello", ".", "<|im_end|>"]}]
    with run(tmp_path, "own_agent/config.yaml", *overrides, script=script, SECRET_OF_THE_RUN="hush") as service:
        ended: dict[str, tuple[str | None, float | None]] = {}
        deadline = time.monotonic() + 240
        while len(ended) < len(DOES):
            assert time.monotonic() < deadline
            assert service.process.poll() is None
            time.sleep(0.2)
            for one, _ in service.sessions():
                if one.session.ending is not None:
                    ended.setdefault(one.session.task_id.partition("@")[0], (one.session.ending, one.reward))
        failed = ("reward_failed", None)
        assert ended == {"work": ("ended", 0.5), "raise": failed, "die": failed, "hang": failed}
        worker = (service.folder / "logs" / "worker-0.log").read_text()
        assert "the agent failed on task 'die': CallFailed: its process was killed by signal 6 (SIGABRT)" in worker
        assert "the agent failed on task 'hang': CallFailed: it took longer than 4 s" in worker
        assert "ValueError: as the task says" in worker
        log = (service.folder / "logs" / "agents-w0.log").read_text()
        assert "work | does work, with no secret" in log
        assert "Traceback" in log
        train = (service.folder / "logs" / "train.log").read_text()
        assert "waiting for agents" not in train
        service.stop()
