"""The ranks of a net as jobs: one process each, the same settings for all, and each one's place among them.

    jobs = rank_jobs("rank", settings.spec(), scheduler, folder.processes, within_s=270)     # rank-0 leads; as many as the backend's size
    place = Place.model_validate(job["place"])                                               # in the rank

They meet through a file in the run folder (parallel/meeting.py) whose name nobody had before, so that nothing an earlier life left behind is taken
for one of them. No torch. Used by launch.py and replay.py (write) and worker.py (reads).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from areal.cluster.scheduler import Job, Scheduler
from areal.config.backend_spec import parse_backend
from areal.config.section import Section

_MEETING = ".meeting-"


class Place(Section):
    rank: int = 0
    names: tuple[str, ...] = ("rank-0",)
    """Of all ranks of the net, in order."""
    logs: tuple[str, ...] = ()
    """Of all ranks, where this host has them; for what a rank said last."""
    log_starts: tuple[int, ...] = ()
    """Bytes of each log that earlier processes wrote."""
    meeting: str = ""
    """The file that they meet through; empty where there is one rank."""
    within_s: float = Field(300, gt=0)
    """How long all of them may take to come, to meet and to load."""

    @property
    def size(self) -> int:
        return len(self.names)

    @property
    def name(self) -> str:
        return self.names[self.rank]


LARGE_BLOCKS_APART = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
"""For glibc, where there is an adapter: its gradients are many and small, and in one heap with the activations they keep what a micro-batch frees
from serving the next one (135M at 512 tokens: 2.8 GB instead of 1.5). Other C libraries ignore the name."""


def rank_jobs(
    net: str, settings: Mapping[str, Any], scheduler: Scheduler, folder: Path, *, within_s: float
) -> list[Job]:
    """One job per rank, named NET-0, NET-1, …; the first is the leader. settings: an EngineSettings' spec. folder: of the run's processes."""
    for leftover in folder.glob(f"{net}{_MEETING}*"):
        leftover.unlink(missing_ok=True)
    size = parse_backend(str(settings["backend"])).size
    names = tuple(f"{net}-{rank}" for rank in range(size))
    logs = [scheduler.log_path(name) for name in names]
    common = {
        "names": names,
        "logs": tuple(map(str, logs)),
        "log_starts": tuple(log.stat().st_size if log.exists() else 0 for log in logs),
        "meeting": str(folder / f"{net}{_MEETING}{secrets.token_hex(8)}") if size > 1 else "",
        "within_s": within_s,
    }
    places = [Place.model_validate(common | {"rank": rank}) for rank in range(size)]
    env = LARGE_BLOCKS_APART if settings.get("lora") else {}
    return [
        Job(place.name, "areal.engine.worker", dict(settings) | {"place": place.model_dump(mode="json")}, env=env)
        for place in places
    ]
