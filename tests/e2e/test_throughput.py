"""[throughput] beside what a person counts: the samples of a hundred steps by the time that they took, from the lines of the log alone."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import pytest

from areal.base.logs import parse_line
from tests.e2e.running import typed

STEPS, INTERVAL = 100, 10


def clock(line: dict[str, object]) -> datetime:
    return datetime.strptime(str(line["ts"]), "%H:%M:%S.%f")


@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_the_samples_per_second_of_a_hundred_steps_are_a_hand_count(tmp_path: Path) -> None:
    words = f"--config configs/tiny.yaml --output-dir {tmp_path / 'run'} total_train_steps={STEPS} evaluator.path=null"
    words += f" train_dataset.batch_size=2 gconfig.n_samples=2 stats_logger.log_interval={INTERVAL}"
    done = typed(
        f"python -m areal.train {words} rollout.agent.gateway_port=0 cluster.fileroot={tmp_path}", within_s=1100
    )
    assert done.returncode == 0, done.stderr
    parsed = [one for one in map(parse_line, (tmp_path / "run/logs/train.log").read_text().splitlines()) if one]
    trained = [one.facts for one in parsed if one.part == "train"]
    lines = [one.facts for one in parsed if one.part == "throughput"]
    assert [line["step"] for line in lines] == list(range(INTERVAL - 1, STEPS, INTERVAL))
    for line, before in zip(lines[1:], lines, strict=False):  # the first counts from the start, which no line tells
        first, last = int(str(before["step"])) + 1, int(str(line["step"]))
        samples = sum(int(str(one["updated"])) for one in trained[first : last + 1])
        seconds = (clock(trained[last]) - clock(trained[first - 1])) % timedelta(days=1)
        by_hand = samples / seconds.total_seconds()
        assert float(str(line["samples_per_second"])) == pytest.approx(by_hand, rel=0.02), line
    samples = sum(int(str(one["updated"])) for one in trained[INTERVAL:])
    seconds = (clock(trained[-1]) - clock(trained[INTERVAL - 1])) % timedelta(days=1)
    said = sum(1 / float(str(line["samples_per_second"])) for line in lines[1:])
    assert samples / seconds.total_seconds() == pytest.approx((len(lines) - 1) / said, rel=0.05), "all of them together"
