"""The first text, command by command: start the service, a fixed key for several episodes, a step of training, the end."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from areal.base.guide import situation

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples" / "openclaw"


def script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPTS / name), *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_a_fixed_key_trains_the_model_while_it_is_used(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "train.py"), "--config", str(SCRIPTS / "config.yaml")]
    overrides = [
        "experiment_name=my-exp",
        "trial_name=trial-0",
        "rollout.backend=native:d1",
        "actor.backend=fsdp:d1",
        "actor.path=tiny-qwen3",
        "scheduler.type=local",
        "rollout.agent.admin_api_key=my-secret-admin-key",
        "rollout.agent.gateway_port=0",
        "rollout.native.max_context=256",
        "total_train_epochs=1",
        "total_train_steps=1",
        f"cluster.fileroot={tmp_path}",
    ]
    with subprocess.Popen(
        [*command, *overrides], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as service:
        try:
            url = gateway_of(tmp_path / "my-exp" / "trial-0" / "logs" / "train.log", service)
            wrong = script("start_session.py", url, "--admin-key", "nonsense")
            assert wrong.returncode == 1
            assert "Invalid API key" in wrong.stderr

            started = script("start_session.py", url, "--admin-key", "my-secret-admin-key")
            assert started.returncode == 0, started.stderr
            facts = dict(line.split("=", 1) for line in started.stderr.splitlines())
            assert facts["SESSION_API_KEY"].startswith("sk-sess-")
            assert facts["SESSION_ID"] == "demo-task"
            too_early = script("set_reward.py", url, "--api-key", facts["SESSION_API_KEY"], "--reward", "1.0")
            assert too_early.returncode == 1, "there is no answer to reward yet"

            arguments = [url, "--admin-key", "my-secret-admin-key", "--episodes", "4", "--max-tokens", "8"]
            played = script("demo_lifecycle.py", *arguments)
            assert played.returncode == 0, played.stderr
            assert played.stdout.count("answer: ") == 4
            output, _ = service.communicate(timeout=120)
        finally:
            service.kill()
    assert service.returncode == 0, output
    assert "(AReaL) RLTrainer INFO: Proxy gateway available at http://" in output
    assert "[train] step=0 updated=4 loss=" in output
    gone = script("set_reward.py", url, "--api-key", facts["SESSION_API_KEY"])
    assert gone.returncode == 1
    assert situation("gateway-unreachable").said_in(gone.stderr)


def gateway_of(log: Path, service: subprocess.Popen[str]) -> str:
    line = "Proxy gateway available at "
    deadline = time.monotonic() + 120
    while not (log.exists() and line in log.read_text()):
        assert service.poll() is None, service.stdout.read() if service.stdout else ""
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return log.read_text().split(line, 1)[1].split()[0]
