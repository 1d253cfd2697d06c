"""A rank with a fault of its own in its training steps: `FAULT` in its environment says which. `python -m tests.engine.faulty_rank --spec FILE`.

alone: raises. stuck: waits for something that never comes, where the others are in a collective. native: the same outside of Python, with the
interpreter's lock held, so that no thread of the process can say anything.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

from areal.cluster.child import run_child
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


if __name__ == "__main__":
    Optimizer.step = _fault  # type: ignore[method-assign]
    run_child(main)
