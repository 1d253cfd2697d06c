"""A rank with a fault of its own: `FAULT` in its environment says which. `python -m tests.engine.faulty_rank --spec FILE`.

alone: raises. stuck: waits for something that never comes, where the others are in a collective. native: the same outside of Python, with the
interpreter's lock held, so that no thread of the process can say anything. These are in its training steps: at the end of the first, or where
it waits, at their beginning, so that it does so however slow the machine is. writing: the second time that it is to write
its part of a checkpoint it makes the file `reached` beside that, and never comes back.
"""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from typing import Any

from areal.cluster.child import run_child
from areal.engine import checkpoint
from areal.engine.engine import TrainEngine
from areal.engine.optimizer import Optimizer
from areal.engine.worker import main


def _fault(*_: Any) -> Any:
    match os.environ["FAULT"]:
        case "alone":
            raise MemoryError("no room for the moments, on this rank alone")
        case "stuck":
            threading.Event().wait()
        case "native":
            ctypes.PyDLL(None).sleep(1000)
    raise AssertionError("no fault of that name")


_write_own = checkpoint.write_own


def _written_once(path: str, rank: int, held: checkpoint.Held) -> Any:
    checkpoint.write_own = _written_never
    return _write_own(path, rank, held)


def _written_never(path: str, *_: Any) -> Any:
    Path(path).with_name("reached").touch()
    threading.Event().wait()


if __name__ == "__main__":
    match os.environ["FAULT"]:
        case "writing":
            checkpoint.write_own = _written_once
        case "alone":
            Optimizer.step = _fault  # type: ignore[method-assign]
        case _:
            TrainEngine._decoded = _fault  # type: ignore[method-assign]
    run_child(main)
