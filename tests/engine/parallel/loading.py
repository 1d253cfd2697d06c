"""A rank that loads a net, gives its weights away and says how much memory that took:
`python -m tests.engine.parallel.loading BACKEND RANK STORE TINY_DIR MODEL_DIR`.

Prints one JSON object: held (bytes of parameters on this rank), peak (bytes by which the process grew at most while it loaded) and given (the same
while all weights left through the leader, bucket by bucket of at most BUCKET_BYTES). The tiny model of the same family goes first, so that imports and groups of processes do not count."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from areal.config.backend_spec import parse_backend
from areal.engine.load import load_net
from areal.engine.net import Net
from areal.engine.parallel import gather
from areal.engine.parallel.apply import apply
from areal.engine.parallel.world import World, local
from areal.engine.settings import EngineSettings

BUCKET_BYTES = 16 << 20


def memory(field: str) -> int:
    """Bytes of this process, of /proc/self/status: VmRSS now, VmHWM at most since `forget`."""
    [line] = [each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(field)]
    return int(line.split()[1]) * 1024


def forget() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def load(model_dir: str, backend: str, world: World) -> Net:
    """As TrainEngine does, up to the check of a net that is filled: that goes through it, and gathers layer by layer what lies in pieces."""
    facts = {"backend": backend, "model_dir": model_dir, "role": "frozen", "algorithm": "grpo"}
    settings = EngineSettings.model_validate(facts | {"threads": 1, "total_steps": 1})
    net = load_net(settings, world)
    apply(net, world, settings)
    net.fill(world.device)
    return net


def give(net: Net, world: World) -> None:
    """Every weight, whole, on the leader; nobody keeps one."""
    for _ in gather.whole(net.named_tensors(), world):
        continue


def main(backend: str, rank: int, store: str, tiny_dir: str, model_dir: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    spec = parse_backend(backend)
    meeting = dist.FileStore(store, spec.size)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=spec.size)
    world = World.join(spec, rank)
    gather.BUCKET_BYTES = BUCKET_BYTES
    give(load(tiny_dir, backend, world), world)
    forget()
    before = memory("VmRSS")
    net = load(model_dir, backend, world)
    held = sum(local(p).numel() * p.element_size() for p in net.parameters())
    world.gather(b"loaded")  # whoever is first waits
    peak = memory("VmHWM") - before
    forget()
    before = memory("VmRSS")
    give(net, world)
    world.gather(b"given")
    print(json.dumps({"held": held, "peak": peak, "given": memory("VmHWM") - before}))
    meeting.set(f"done-{rank}", "")
    meeting.wait([f"done-{each}" for each in range(spec.size)])  # a link closed too early ends who still reads from it
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:6])
