"""Every recorded token of a batch is written down as trained or masked(reason), so that the sums can be shown and checked.

await settle(store.training, batch)
"""

from __future__ import annotations

import asyncio

from areal.rollout.batch import Batch
from areal.store.base import TrainingStore


async def settle(training: TrainingStore, batch: Batch) -> None:
    """One row per session and reason; the writes share their commits. Call it before the step is published: what a published step
    consumed is accounted for at every moment."""
    await asyncio.gather(*(training.account(session, shares) for session, shares in batch.accounts.items()))
