"""Training rows as a Parquet file: what `areal export --format parquet` writes. Needs pyarrow (`areal[parquet]`).

    with parquet(path) as write:
        write(session)                # a session as export.sessions yields it

A row is a training row of a session, `row` counting from 0; a session without any (dropped empty, deleted) is one row with empty arrays
and `row` null, so that nothing is missing. Rows are written in groups of GROUP_BYTES. Used by export.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

GROUP_BYTES = 32 * 2**20

_SPAN = pa.struct(
    [
        ("interaction_id", pa.string()),
        ("start", pa.int32()),
        ("end", pa.int32()),
        ("raw_reward", pa.float64()),
        ("reward", pa.float64()),
        ("trained", pa.bool_()),
        ("truncated", pa.bool_()),
    ]
)
SCHEMA = pa.schema(
    [
        ("session_id", pa.string()),
        ("task_id", pa.string()),
        ("purpose", pa.string()),
        ("tags", pa.map_(pa.string(), pa.string())),
        ("ending", pa.string()),
        ("fate", pa.string()),
        ("drop_reason", pa.string()),
        ("started_at", pa.float64()),
        ("ended_at", pa.float64()),
        ("reward_sum", pa.float64()),
        ("trained_tokens", pa.int64()),
        ("masked_tokens", pa.map_(pa.string(), pa.int64())),
        ("row", pa.int32()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.int8())),
        ("logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
        ("temperatures", pa.list_(pa.float32())),
        ("spans", pa.list_(_SPAN)),
    ]
)
_FACTS = ("session_id", "task_id", "purpose", "ending", "fate", "drop_reason", "started_at", "ended_at", "reward_sum")
_EMPTY: dict[str, Any] = {
    name: [] for name in ("token_ids", "loss_mask", "logprobs", "versions", "temperatures", "spans")
}


@contextmanager
def parquet(path: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Write sessions to `path` until the block ends."""
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        waiting: list[pa.RecordBatch] = []

        def flush() -> None:
            if waiting:
                writer.write_table(pa.Table.from_batches(waiting, SCHEMA))
                waiting.clear()

        def write(session: dict[str, Any]) -> None:
            waiting.append(pa.RecordBatch.from_pylist(_rows(session), SCHEMA))
            if sum(batch.nbytes for batch in waiting) > GROUP_BYTES:
                flush()

        yield write
        flush()


def _rows(session: dict[str, Any]) -> list[dict[str, Any]]:
    facts = {name: session[name] for name in _FACTS} | {
        "tags": list(session["tags"].items()),
        "trained_tokens": session["account"]["trained"],
        "masked_tokens": list(session["account"]["masked"].items()),
    }
    rows = session["trajectories"]
    return [facts | row | {"row": number} for number, row in enumerate(rows)] or [facts | _EMPTY | {"row": None}]
