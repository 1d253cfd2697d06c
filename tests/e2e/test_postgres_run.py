"""A run whose every process keeps its records in Postgres, also while the server restarts; its password stands in one file alone."""

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
from tests.proxy.service import until
from tests.store.postgres import PostgresServer

ROOT = Path(__file__).resolve().parents[2]
LIVES, GROUPS = (2, 6), 4  # steps at the end of each


@pytest.mark.heavy
async def test_a_run_on_postgres(tmp_path: Path, postgres: PostgresServer) -> None:
    folder, out = tmp_path / "run", tmp_path / "out"
    url = f"postgresql://{postgres.user}:geheim@/postgres?host={postgres.folder}"
    command = [sys.executable, "-m", "areal.train", "--config", "configs/tiny.yaml", "--output-dir", str(folder)]
    overrides = [f"train_dataset.batch_size={GROUPS}", "rollout.agent.gateway_port=0", f"cluster.fileroot={tmp_path}"]
    env = os.environ | {"STORE_URL": url}
    for steps in LIVES:  # the second finds its rows again, and trains on
        with out.open("ab") as log:
            run = await asyncio.create_subprocess_exec(
                *command, *overrides, f"total_train_steps={steps}", "store.url=${STORE_URL}",
                cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            if steps == LIVES[-1]:
                await restarted_while_it_trains(folder / "logs" / "train.log", postgres)
            assert await run.wait() == 0, out.read_text()[-3000:]
        finally:
            if run.returncode is None:
                run.terminate()
                await run.wait()
        assert json.loads((folder / "summary.json").read_text())["steps"] == steps
    assert not (folder / "store.sqlite").exists()
    async with await open_store(find_store(folder), read_only=True) as store:
        books = await store.reading.balance()
        assert books.faults == ()
        assert books.trained.groups == LIVES[-1] * GROUPS
        assert type(books.recorded.tokens) is int
        assert (await store.reading.served()).step == LIVES[-1]
    told = {path.name for path in folder.rglob("*") if path.is_file() and b"geheim" in path.read_bytes()}
    assert told == {"store.url"}
    assert "geheim" not in out.read_text()


async def restarted_while_it_trains(log: Path, postgres: PostgresServer) -> None:
    await until(lambda: f"step={LIVES[0]} updated=" in log.read_text(), 300)
    postgres.stop()
    try:
        await until(lambda: "this process waits for its store" in log.read_text(), 120)
    finally:
        postgres.start()
