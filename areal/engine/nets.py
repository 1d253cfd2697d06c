"""The nets of a run: the policy that is trained, and those it asks: a frozen reference, a teacher, a critic that learns beside it.

    nets = Nets(policy, credit, reference=ref)             # each an EngineClient: an instance of the one engine, in its own rank
    stats = await nets.train(batch.groups, step=3, current_version=3, lags=batch.lags)
    await nets.save(path, step=4, full=True); await nets.restore(path)

A step: the others score the rows first, then credit.py makes advantages of rewards, values and KL, then the policy takes its step, then
the critic, both on what was scored before either moved. A critic's checkpoint lies beside the policy's; both carry the mark of one
save, so that parts of two are never taken for one (checkpoint_files.py). Used by train.py, assemble.py and rollout/snapshots.py.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.base.types import FloatArray, Group
from areal.engine.checkpoint_files import critic_beside
from areal.engine.client import EngineClient
from areal.engine.commands import Row
from areal.engine.credit import Credit, Scored

CRITIC_STATS = ("loss", "clip_ratio", "value_error", "grad_norm", "lr")
"""What of the critic's step is reported, as critic_NAME."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A batch as the nets take it. reward_kl: the mean KL per trained token that was taken off the reward, None elsewhere."""

    rows: list[Row]
    critic_rows: list[Row]
    reward_kl: float | None


class Nets:
    """One policy and the nets it is trained with; see the module's docstring."""

    def __init__(
        self,
        policy: EngineClient,
        credit: Credit,
        *,
        reference: EngineClient | None = None,
        teacher: EngineClient | None = None,
        critic: EngineClient | None = None,
        policy_is_reference: bool = False,
    ) -> None:
        """policy_is_reference: without its adapter it is the reference."""
        self.policy = policy
        self.credit = credit
        self._reference = policy if policy_is_reference else reference
        self._of_base = policy_is_reference
        self._teacher = teacher
        self._critic = critic

    async def train(
        self, groups: Sequence[Group], *, step: int, current_version: int, lags: Mapping[int, int]
    ) -> dict[str, float]:
        """One training step of all that learns; the policy's stats (commands.Stepped), the critic's with a prefix."""
        return await self.train_prepared(
            await self.prepare(groups), step=step, current_version=current_version, lags=lags
        )

    async def prepare(self, groups: Sequence[Group]) -> Prepared:
        """What every net is given to train on; moves none of them."""
        scored = await self._score(groups)
        rows, kl = self.credit.rows(groups, scored), self.credit.mean_kl_off_the_reward(groups, scored)
        return Prepared(rows, self.credit.critic_rows(groups, scored) if self._critic is not None else [], kl)

    async def train_prepared(
        self, prepared: Prepared, *, step: int, current_version: int, lags: Mapping[int, int]
    ) -> dict[str, float]:
        """The second half of `train`."""
        stats = await self.policy.train_step(prepared.rows, step, current_version, lags)
        if prepared.reward_kl is not None:
            stats |= {"ref_kl": prepared.reward_kl}
        if self._critic is None:
            return stats
        theirs = await self._critic.train_step(prepared.critic_rows, step, current_version)
        return stats | {f"critic_{name}": theirs[name] for name in CRITIC_STATS}

    async def begin_save(
        self, path: str, step: int, *, full: bool, model: bool = True, about: Mapping[str, Any] | None = None
    ) -> asyncio.Task[dict[str, Any]]:
        """Ask for the policy's checkpoint folder and, with `full`, its critic's beside it; returns once both are asked for. model: false where
        what an adapter makes of its base is not needed.

        Steps that are asked for from here on change nothing in it. Await the task for when all is on disk: `held_seconds` and
        `write_seconds` of the slower net, `bytes` of both; raises CheckpointError where one could not be written."""
        facts = dict(about or {}) | {"save": secrets.token_hex(8), "critic": self._critic is not None}
        writing = []
        if self._critic is not None and full:
            beside = str(critic_beside(Path(path)))
            writing.append(await self._critic.begin_save(beside, step, full=True, about={"save": facts["save"]}))
        writing.append(await self.policy.begin_save(path, step, full=full, model=model, about=facts))
        return asyncio.create_task(_all_written(writing), name=f"checkpoint {path}")

    async def save(self, path: str, step: int, *, full: bool) -> None:
        """The same, and wait until it is written."""
        await (await self.begin_save(path, step, full=full))

    async def restore(self, path: str) -> dict[str, Any]:
        """Go on from there; returns the policy's facts. Raises ConfigError where the critic's part is missing."""
        if self._critic is not None:
            await self._critic.restore(str(critic_beside(Path(path))))
        return await self.policy.restore(path)

    async def _score(self, groups: Sequence[Group]) -> Scored:
        asked = (self._reference, self._teacher, self._critic)
        if asked == (None, None, None):
            return Scored()
        rows = self.credit.bare_rows(groups)
        reference, teacher, values = await asyncio.gather(
            _ask(self._reference, rows, base=self._of_base), _ask(self._teacher, rows), _ask(self._critic, rows)
        )
        return Scored(reference, teacher, values)


async def _ask(net: EngineClient | None, rows: Sequence[Row], *, base: bool = False) -> list[FloatArray] | None:
    return None if net is None else await net.score(rows, base=base)


async def _all_written(writing: Sequence[asyncio.Task[dict[str, Any]]]) -> dict[str, Any]:
    """Waits for every one of them, also where another fails."""
    try:
        await asyncio.wait(writing)
    finally:
        for task in writing:
            task.cancel()  # where the wait itself was cancelled; the ranks go on
    done = [task.result() for task in writing]
    slowest = {name: max(one[name] for one in done) for name in ("held_seconds", "write_seconds")}
    return slowest | {"bytes": sum(one["bytes"] for one in done)}
