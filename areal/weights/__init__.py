"""How a version of the weights travels from the ranks to the servers: one table of transfers.

    source("shared_memory", run_dir).publish(named_tensors, version)      # rank
    sink("shared_memory", run_dir).receive(manifest)                      # server, one sink for all versions

A transfer is one file here, one name in config/run.py's TransferName and one line in the table below.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from areal.base.errors import ConfigError
from areal.weights.base import Sink, Source
from areal.weights.delta import DeltaSink, DeltaSource
from areal.weights.disk import DiskSink, DiskSource
from areal.weights.shared_memory import SharedMemorySink, SharedMemorySource

__all__ = ["TRANSFERS", "Sink", "Source", "Transfer", "sink", "source"]


class Transfer(NamedTuple):
    source: Callable[[Path], Source]
    sink: Callable[[Path], Sink]


TRANSFERS: dict[str, Transfer] = {
    "shared_memory": Transfer(SharedMemorySource, SharedMemorySink),
    "disk": Transfer(DiskSource, DiskSink),
    "delta": Transfer(DeltaSource, DeltaSink),
}


def source(name: str, run_dir: Path) -> Source:
    """The publishing side of transfer `name`. Raises ConfigError for an unknown name."""
    return _transfer(name).source(run_dir)


def sink(name: str, run_dir: Path) -> Sink:
    """The receiving side of transfer `name`. Raises ConfigError for an unknown name."""
    return _transfer(name).sink(run_dir)


def _transfer(name: str) -> Transfer:
    if name not in TRANSFERS:
        raise ConfigError(f"weights.transfer={name!r} is unknown; choose one of {', '.join(TRANSFERS)}")
    return TRANSFERS[name]
