"""Whether another process exists, for whoever cleans up after those that ended.

    exists(pid)          # also one that has ended and was not reaped, also another user's

Used by cluster, gateway/state.py and weights/local_copy.py; trees of processes are cluster/process_tree.py's.
"""

from __future__ import annotations

import os


def exists(pid: int) -> bool:
    """Whether a process of this id exists, also one that has ended and was not reaped (a zombie), also another user's."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
