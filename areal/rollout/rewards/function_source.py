"""A Python function of the user's that rewards, in processes of its own: `f(task, messages, answers)`, plain or async.

    async with ProcessPool("my_rewards:score", key="rollout.reward.path", ...) as pool:
        source = FunctionSource(pool, "my_rewards:score", reading)

It returns a number (or a bool) for the last answer, {answer id: number}, or None where it has no reward to give: that one is dropped as
reward_failed at once. What it raises, and a call that is late or crashes its process, is tried again (rollout.reward.attempts); a
ConnectionError or a TimeoutError that it raises says that what it asks is away.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from areal.base.errors import CallFailed
from areal.rollout.agent_output import Spoken
from areal.rollout.pool import ProcessPool
from areal.rollout.rewards.case import Case
from areal.rollout.rewards.parsers import Reading
from areal.rollout.rewards.source import Away, Hopeless, Rewards, Unreadable


class FunctionSource:
    """Source."""

    has_probe = False

    def __init__(self, pool: ProcessPool, path: str, reading: Reading) -> None:
        self.name = path
        self._pool = pool
        self._reading = reading

    async def rewards(self, cases: Sequence[Case]) -> list[Rewards]:
        [case] = cases
        return [self._read(await self._call(case), case)]

    async def probe(self, case: Case | None) -> None:
        """A function has nothing beside its calls that could be away, so one of those that met it is made again."""
        if case is not None:
            with suppress(Unreadable):  # it is there, and does not like the case
                await self._call(case)

    async def _call(self, case: Case) -> Any:
        task = {"task_id": case.task_id, **case.task}
        try:
            return await self._pool.call(
                task, list(case.messages), list(case.answers), say=Spoken(case.session_id).line
            )
        except CallFailed as error:
            if error.why == "raised" and _is_away(str(error)):
                raise Away(
                    str(error), "your reward function says by this exception that what it asks is away"
                ) from error
            raise Unreadable(str(error)) from error

    def _read(self, returned: Any, case: Case) -> Rewards:
        if returned is None:
            raise Hopeless("it returned None: it has no reward for this session")
        given = returned if isinstance(returned, Mapping) else {None: returned}
        if not given:
            raise Hopeless("it returned no reward for any answer")
        rewards: dict[str | None, float] = {}
        for name, value in given.items():
            if not isinstance(value, int | float):
                raise Unreadable(f"it returned {value!r:.100} for {name or 'the last answer'}; return a number")
            if name is not None and name not in case.ids:
                raise Unreadable(
                    f"it rewarded {name!r:.100}, which is no answer of this session; use the ids of `answers`"
                )
            rewards[name] = self._reading.reward(float(value))
        return rewards


def _is_away(error: str) -> bool:
    """Whether a function raised one of Python's own exceptions for what cannot be reached."""
    kind = getattr(builtins, error.partition(":")[0], None)
    return isinstance(kind, type) and issubclass(kind, ConnectionError | TimeoutError)
