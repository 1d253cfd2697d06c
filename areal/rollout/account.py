"""Every recorded token of a batch is written down as trained or masked(reason), so that the sums can be shown and checked.

await settle(store.training, batch)
"""

from __future__ import annotations

import asyncio

from areal.rollout.batcher import Batch
from areal.store.base import TrainingStore


async def settle(training: TrainingStore, batch: Batch) -> None:
    """One row per session of the batch; the writes share their commits."""
    await asyncio.gather(
        *(training.account(session, trained, masked) for session, (trained, masked) in batch.accounts.items())
    )
