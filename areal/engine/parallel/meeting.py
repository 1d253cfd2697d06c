"""How the ranks of a net find each other on one host: through a file in the run folder, with a deadline, and nobody else can come.

    meeting = Meeting(place)
    urls = meeting.come("tcp://127.0.0.1:41873")     # waits for all; names the one that did not come
    world = meeting.join(spec, timeout_s=3600)       # the process group; gloo on loopback

The file lies in a folder that only its owner enters; gloo's own connections are made on loopback alone. Used by performer.py.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from areal.base.errors import ProcessDied
from areal.cluster.log_tail import last_lines
from areal.config.backend_spec import BackendSpec
from areal.engine.parallel.world import World
from areal.engine.place import Place

_LOOK_S = 0.05
_LEADER_FIRST_S = 5.0
"""How much longer the others wait than the leader, so that it is the leader that says who is missing."""


class Meeting:
    """For one rank."""

    def __init__(self, place: Place) -> None:
        self._place = place
        path = Path(place.meeting)
        path.touch(mode=0o600)
        self._store = FileStore(str(path), place.size)
        self._store.set_timeout(timedelta(seconds=place.within_s))

    def come(self, url: str) -> list[str]:
        """Say where this rank listens; where all of them do, once all have come. Raises ProcessDied naming those that did not."""
        place = self._place
        self._store.set(f"url/{place.rank}", url)
        deadline = time.monotonic() + place.within_s + (_LEADER_FIRST_S if place.rank else 0)
        missing = set(range(place.size))
        while missing:
            missing = {rank for rank in missing if not self._store.check([f"url/{rank}"])}
            if missing and time.monotonic() > deadline:
                raise ProcessDied(self._absent(sorted(missing)))
            time.sleep(_LOOK_S if missing else 0)
        return [self._store.get(f"url/{rank}").decode() for rank in range(place.size)]

    def join(self, spec: BackendSpec, *, timeout_s: float) -> World:
        """All ranks call it. timeout_s: of every collective; what watches the ranks is to speak before."""
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        dist.init_process_group(
            "gloo",
            store=self._store,
            rank=self._place.rank,
            world_size=self._place.size,
            timeout=timedelta(seconds=timeout_s),
        )
        return World.join(spec, self._place.rank)

    def _absent(self, missing: list[int]) -> str:
        place, said = self._place, []
        for rank in missing:
            lines = last_lines(Path(place.logs[rank]), start=place.log_starts[rank]) if place.logs else ""
            said.append(
                f"{place.names[rank]} said last:\n{lines}" if lines else f"{place.names[rank]} has said nothing"
            )
        names = " and ".join(place.names[rank] for rank in missing)
        return (
            f"{names} did not come on {socket.gethostname()} within {place.within_s:.0f} s, and the ranks of a net start together; raise "
            f"scheduler.startup_timeout_seconds if they only need longer. {'; '.join(said)}"
        )
