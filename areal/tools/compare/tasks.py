"""Whether two runs trained the same: their settings, and the tasks of the steps that are compared.

    found = await same_work(one, other, last)
    found.settings            # {"actor.optimizer.lr": ("0.001", "0.0001")}
    found.shared              # 0.98: of the groups that were trained up to there, those of tasks that the other trained as often

Which groups a step trained stands in steps.jsonl, whose tasks they are in the store. What must differ (names, folders, ports, the one switch,
and what a run derives from it) is no difference.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from areal.rollout.history import read_history
from areal.store import open_store
from areal.store.location import find_store, has_store
from areal.tools.compare.side import Side

SWITCH = "rollout.max_head_offpolicyness"
_OWN = (
    "experiment_name",
    "trial_name",
    "cluster.fileroot",
    "stats_logger.log_dir",
    "rollout.agent.gateway_port",
    "store.url",
)
_PAGE = 1000


@dataclass(frozen=True, slots=True)
class Work:
    """settings: key -> value here and there. shared: None where a folder has no steps.jsonl and store (it is a log folder).
    alone: tasks that one of the two alone trained, at most three each. groups: trained up to the last compared step, of either."""

    settings: dict[str, tuple[str, str]]
    shared: float | None
    groups: tuple[int, int] = (0, 0)
    alone: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())


async def same_work(one: Side, other: Side, last: int) -> Work:
    """Raises StoreError where a store cannot be read."""
    settings = {
        key: values for key, values in one.config.differences(other.config).items() if key not in (*_OWN, SWITCH)
    }
    mine, theirs = await _tasks(one.folder, last), await _tasks(other.folder, last)
    if mine is None or theirs is None:
        return Work(settings, None)
    most = max(mine.total(), theirs.total())
    return Work(
        settings,
        (mine & theirs).total() / most if most else None,
        (mine.total(), theirs.total()),
        (_few(mine.keys() - theirs.keys()), _few(theirs.keys() - mine.keys())),
    )


async def _tasks(folder: Path, last: int) -> Counter[str] | None:
    """How often each task was trained up to a step."""
    if not has_store(folder) or not (folder / "steps.jsonl").is_file():
        return None
    steps = read_history(folder / "steps.jsonl").steps
    trained = Counter(group for step, own in steps.items() if step <= last for group in own.groups)
    tasks: dict[str, str] = {}
    async with await open_store(find_store(folder), read_only=True) as store:
        after = ""
        while page := await store.reading.walk(after, _PAGE):
            tasks |= {one.session.group_id: one.session.task_id for one in page}
            after = page[-1].session.id
    return Counter(tasks[group] for group in trained.elements() if group in tasks)


def _few(tasks: set[str]) -> tuple[str, ...]:
    return tuple(sorted(tasks)[:3])
