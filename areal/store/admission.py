"""The capacity law: how many groups may open now without outrunning training by more than max_lag versions.

    free_groups(limits, running=3, accepted=5)

    free = min(max_concurrent - running, (max_lag + 1) * batch_groups - (running + accepted))

(arXiv:2505.24298, the staleness bound, at a fixed batch size.) accepted = groups that have ended and are neither consumed nor
dropped. Because consumed groups leave the sum, no version and no count of the past stands in the law, and a run that
resumes at version 10 with an empty store has exactly the room of a fresh one. queue_size, where set, bounds running + accepted
too, so that the queue of finished groups never grows beyond it. Pure: the store applies it inside the inserting
transaction (sql/groups.py), readers apply it to derived counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from areal.base.errors import ConfigError
from areal.base.types import Limits


@dataclass(frozen=True, slots=True)
class Bound:
    """One term of the law, in groups: `used` of `limit` are taken; key is the config key that raises it."""

    key: str
    used: int
    limit: int

    @property
    def free(self) -> int:
        return self.limit - self.used


def tightest(limits: Limits, running: int, accepted: int) -> Bound:
    """The term of the law that leaves the fewest groups free; of equal ones the first of the law."""
    pending = running + accepted
    bounds = [
        Bound("rollout.max_concurrent_rollouts", running, limits.max_concurrent),
        Bound("rollout.max_head_offpolicyness", pending, lag_bound(limits)),
    ]
    if limits.queue_size:
        bounds.append(Bound("rollout.queue_size", pending, limits.queue_size))
    return min(bounds, key=lambda bound: bound.free)


def free_groups(limits: Limits, running: int, accepted: int) -> int:
    """Groups that may open now; never negative (a recovery can hand back more groups than the lag allows), none while they are held."""
    return 0 if limits.held else max(0, tightest(limits, running, accepted).free)


def most_running(limits: Limits) -> int:
    """Groups that can run at once where nothing waits to be trained."""
    return min(limits.max_concurrent, lag_bound(limits))


def queue_bound(limits: Limits) -> int:
    """Finished groups that may wait to be trained: queue_size where it is set."""
    return limits.queue_size or lag_bound(limits)


def lag_bound(limits: Limits) -> int:
    """Groups that may run or wait at once without one growing older than max_lag versions."""
    return (limits.max_lag + 1) * limits.batch_groups


def survivors_needed(n_samples: int) -> int:
    """Fewest good sessions that make a group worth training: a group-relative advantage compares at least two."""
    return 1 if n_samples == 1 else 2


def check_limits(limits: Limits) -> None:
    """Raise ConfigError for limits under which no session could ever start or be trained."""
    least = {
        "rollout.max_concurrent_rollouts": (limits.max_concurrent, 1),
        "rollout.max_head_offpolicyness": (limits.max_lag, 0),
        "train_dataset.batch_size": (limits.batch_groups, 1),
        "gconfig.n_samples": (limits.n_samples, 1),
        "rollout.queue_size": (limits.queue_size, 0),
    }
    for key, (value, minimum) in least.items():
        if value < minimum:
            raise ConfigError(f"{key} is {value}; it must be at least {minimum}")
    if not limits.group_timeout_s > 0:
        raise ConfigError(f"rollout.group_timeout_seconds is {limits.group_timeout_s}; it must be above 0")
