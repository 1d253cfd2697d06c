"""Every run a test has made must balance: `balanced(folder)` after it, whether it ended, was stopped or was killed."""

from __future__ import annotations

import asyncio
from pathlib import Path

from areal.tools.status import Status, look


def balanced(folder: Path) -> Status:
    """The run's status, as `areal status` sees it; fails naming the sessions and groups that do not add up."""
    status = asyncio.run(look(folder))
    assert status.faults == (), "\n".join(status.faults)
    assert status.books.recorded == status.books.total
    return status
