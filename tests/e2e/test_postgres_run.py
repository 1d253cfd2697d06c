"""A run whose every process keeps its records in Postgres, and whose password stands in one file alone."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal.store import open_store
from areal.store.location import find_store
from tests.store.postgres import PostgresServer

ROOT = Path(__file__).resolve().parents[2]
STEPS, GROUPS = 2, 4


@pytest.mark.heavy
async def test_a_run_on_postgres(tmp_path: Path, postgres: PostgresServer) -> None:
    folder = tmp_path / "run"
    url = f"postgresql://{postgres.user}:geheim@/postgres?host={postgres.folder}"
    command = [sys.executable, "-m", "areal.train", "--config", "configs/tiny.yaml", "--output-dir", str(folder)]
    overrides = [f"train_dataset.batch_size={GROUPS}", "rollout.agent.gateway_port=0", f"cluster.fileroot={tmp_path}"]
    env = os.environ | {"STORE_URL": url}
    for life in (1, 2):  # the second finds its rows again, and trains on
        steps = [f"total_train_steps={life * STEPS}"]
        done = await asyncio.to_thread(
            subprocess.run, [*command, *overrides, *steps, "store.url=${STORE_URL}"],
            cwd=ROOT, env=env, capture_output=True, text=True, timeout=580,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert json.loads((folder / "summary.json").read_text())["steps"] == life * STEPS
    assert not (folder / "store.sqlite").exists()
    async with await open_store(find_store(folder), read_only=True) as store:
        books = await store.reading.balance()
        assert books.faults == ()
        assert books.trained.groups == 2 * STEPS * GROUPS
        assert type(books.recorded.tokens) is int
        assert (await store.reading.served()).step == 2 * STEPS
    told = {path.name for path in folder.rglob("*") if path.is_file() and b"geheim" in path.read_bytes()}
    assert told == {"store.url"}
    assert "geheim" not in done.stdout + done.stderr
