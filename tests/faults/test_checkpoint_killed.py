"""SIGKILL of a process that writes a checkpoint, at each stage of it: the one before is found whole, and nothing half written stays."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from areal.engine.checkpoint_files import checkpoints, damage
from areal.rollout.recovery import newest_good

WRITER = """
import json, os, signal, sys, time
from pathlib import Path
import torch
from areal.engine.checkpoint import hold, write

torch.set_num_threads(1)
folder, model = Path(sys.argv[1]), sys.argv[2]
large = {f"w{n}": torch.full((8 << 20,), float(n)) for n in range(3)}              # 96 MiB: synced on the way
held = hold(large.items(), {"config.json": b"{}"}, large.items(), {"step": 1})
seen = []
for run, stage in enumerate(("config.json", "model.safetensors", "recovery/pieces-0.safetensors", "recovery/state.json")):
    here = folder / str(run)
    small = hold([("w", torch.zeros(1))], {"config.json": b"{}"}, [("m", torch.zeros(1))], {"step": 10})
    write(here / "step-000010", small, model, step=10)
    if (pid := os.fork()) == 0:
        write(here / "step-000020", held, model, step=20)
        os._exit(0)
    while not (here / ".step-000020.partial" / stage).exists() and not (here / "step-000020").exists():
        time.sleep(0.0005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    seen.append([str(run), (here / "step-000020").exists()])
print(json.dumps(seen))
"""


def test_T081_a_writer_that_is_killed_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    done = subprocess.run(
        [sys.executable, "-c", WRITER, str(tmp_path), str(model)], capture_output=True, text=True, timeout=480
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert [run for run, _ in seen] == ["0", "1", "2", "3"]
    assert sum(complete for _, complete in seen) <= 2, "the kill came too late to say anything"
    for run, complete in seen:
        folder = tmp_path / run
        assert complete or (folder / ".step-000020.partial").exists()
        found = newest_good(folder, "on")
        assert found is not None
        assert found.step == (20 if complete else 10)
        assert damage(found.path, recovery=True) is None
        assert [one.step for one in checkpoints(folder)] == ([20, 10] if complete else [10])
        assert not list(folder.glob(".*"))
