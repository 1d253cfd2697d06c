"""What a server does with a load of weights, arrow by arrow: load → verify → pause → label → resume.

    swap = Swap(label=3)
    swap = swap.asked(4)          # WeightsRefused where a newer version was asked for
    swap = swap.labelled(4)       # in the moment in which the weights change, and not after a newer one was asked for

load: the published files are opened and mapped. verify: every byte by its checksum, every tensor's name, shape and values. pause: the engine
ends the step it is in; what comes before that disturbs nobody. label: weights and label change at once. resume: the next step. What fails or runs
out of time before `label` leaves weights and label as they were, and says at which arrow (`WeightsRefused.arrow`). Requests may arrive in any
order, and late: the version that a server serves only grows. Pure. Used by native/runner.py and scripted/engine.py; the controller's
half is rollout/update.py.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from areal.base.errors import WeightsArrow, WeightsRefused


@dataclass(frozen=True, slots=True)
class Swap:
    """label: of the weights that are served. newest: the highest version that anybody asked for."""

    label: int
    newest: int = -1

    def asked(self, version: int) -> Swap:
        """Raises WeightsRefused for a version that is older than what is served or asked for."""
        self._refuse_older(version, "load")
        return replace(self, newest=version)

    def labelled(self, version: int) -> Swap:
        """The weights change now. Raises WeightsRefused if a newer version was asked for meanwhile."""
        self._refuse_older(version, "label")
        return replace(self, label=version)

    def _refuse_older(self, version: int, arrow: WeightsArrow) -> None:
        if version < max(self.label, self.newest):
            raise WeightsRefused(
                arrow,
                f"version {version} is superseded by version {max(self.label, self.newest)}; version {self.label} stays",
            )


class Attempt:
    """One load: the arrow it is at, and who settles it, the engine that labels it or the deadline that gives it up. Several threads."""

    def __init__(self) -> None:
        self.arrow: WeightsArrow = "load"
        self._settled = threading.Lock()

    def settle(self) -> bool:
        """True for the first who asks."""
        return self._settled.acquire(blocking=False)
