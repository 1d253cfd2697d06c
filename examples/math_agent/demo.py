"""`make demo`: start the service, let an ordinary OpenAI client play against it, watch the reward climb.

    python examples/math_agent/demo.py [key=value …]         # overrides of config.yaml, for example total_train_steps=10

Two programs that know of each other only a URL: `areal train`, and examples/play.py. This script starts the first, waits for the
line with the gateway's address, starts the second, and stops it when the first has ended.
"""

import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LINE = "Proxy gateway available at "
AGENT = "examples.math_agent.agent"


def main() -> int:
    trial = time.strftime("demo-%Y%m%d-%H%M%S")
    run = ROOT / "runs" / "math-agent" / trial
    command = [sys.executable, "-m", "areal.train", "--config", str(HERE / "config.yaml"), "--output-dir", str(run)]
    service = subprocess.Popen([*command, f"trial_name={trial}", *sys.argv[1:]], cwd=ROOT)
    player = None
    try:
        url = wait_for_gateway(run / "logs" / "train.log", service)
        if url is not None:
            with (run / "logs" / "play.log").open("w") as log:
                seed = next((word.removeprefix("seed=") for word in sys.argv if word.startswith("seed=")), "1")
                play = [sys.executable, "-m", "examples.play", url, "--samples", "8", "--groups", "8", "--seed", seed]
                play += ["--agent", f"{AGENT}:MathAgent", "--tasks", f"{AGENT}:sums"]
                player = subprocess.Popen(play, cwd=ROOT, stdout=log, stderr=log)
        return service.wait()
    except KeyboardInterrupt:  # the terminal sent it to the service, too, which saves and ends
        return service.wait()
    finally:
        for process in (player, service):
            if process is not None and process.poll() is None:
                process.terminate()
                process.wait()


def wait_for_gateway(log: Path, service: "subprocess.Popen[bytes]") -> str | None:
    """The gateway's URL from the service's log; None if the service ended first."""
    while service.poll() is None:
        if log.exists():
            for line in log.read_text().splitlines():
                if LINE in line:
                    return line.split(LINE, 1)[1].strip()
        time.sleep(0.2)
    return None


if __name__ == "__main__":
    sys.exit(main())
