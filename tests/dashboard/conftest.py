"""The page's server on a run folder as a run leaves it: store, metrics, config, a model folder with a small byte-level tokenizer."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from areal.base.metrics import MetricsFile, declare
from areal.base.types import Completion, Interaction, Limits, Message, SessionRequest, Share, Tag, Version, WorkerInfo
from areal.rollout import metrics as _declared  # noqa: F401
from areal.store import open_store, store_url
from areal.store.base import Store

WORKER = WorkerInfo("w0", "http://127.0.0.1:1", 4711, "here", 0.0)
LAG = declare("train/lag_mean", "mean", "steps that a trained token's weights were behind the trained ones")
ODD = "<b>&'\"/../☃"  # a task id as a client may send it
VOCABULARY = ["<s>", "4", "Ġis", "Ġthe", "Ġsum", "Ċ", "âĺ", "<script>", "."]


def interaction(session_id: str, index: int, asked: str, **more: object) -> Interaction:
    count = len(VOCABULARY)
    completion = Completion(
        token_ids=np.arange(count, dtype=np.int32),
        logprobs=-np.linspace(0.05, 6.0, count, dtype=np.float32),
        versions=np.array([4] * 5 + [5] * (count - 5), np.int32),
        kept_mass=np.ones(count, np.float32),
        temperature=1.0,
        finish_reason="stop",
    )
    fields: dict[str, object] = {
        "id": f"{session_id}/{index}",
        "session_id": session_id,
        "index": index,
        "prompt_ids": np.arange(12, dtype=np.int32),
        "completion": completion,
        "messages": (Message("user", asked),),
        "reply": Message("assistant", "4 is the sum"),
        "started_at": 1000.0,
        "finished_at": 1000.4,
    }
    return Interaction(**(fields | more))  # type: ignore[arg-type]


async def fill(store: Store) -> None:
    await store.training.set_limits(Limits(max_concurrent=16, max_lag=1, batch_groups=8))
    for number, ending in enumerate(("ended", "ended", "expired", "reward_failed")):
        session = await store.sessions.begin(SessionRequest(f"sum-{number}", f"k{number}", "w0", tags={"user": "ada"}))
        first = interaction(session.id, 0, "2+2?")
        await store.sessions.add(first)
        tags: tuple[Tag, ...] = ("superseded",) if number == 1 else ()
        again = (*first.messages, first.reply, Message("user", "sure?\n<img src=x onerror=alert(1)>"))
        await store.sessions.add(interaction(session.id, 1, "", messages=again, credit_parent=first.id, tags=tags))
        if ending == "ended":
            await store.sessions.reward(session.id, 1.0, None)
        await store.sessions.end(session.id, ending)  # type: ignore[arg-type]
    trained, masked = await store.training.ready()
    await store.training.account("sum-0", {"": Share(18, 2)})
    await store.training.account("sum-1", {"": Share(9, 1), "superseded": Share(9, 1)})
    await store.training.advance(Version(6, 6, "life"), [trained.id, masked.id])
    live = await store.sessions.begin(SessionRequest(ODD, "k9", "w0"))
    await store.sessions.add(interaction(live.id, 0, "still here?"))


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("my-exp") / "trial"
    model, logs = run / "model", run / "logs"
    for folder in (run, model, logs, run / "processes"):
        folder.mkdir()
    backend = tokenizers.Tokenizer(models.BPE({token: number for number, token in enumerate(VOCABULARY)}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    backend.save(str(model / "tokenizer.json"))
    (run / "processes" / "worker-0.spec.json").write_text(json.dumps({"model_dir": str(model), "run_token": "hush"}))
    (run / "config.yaml").write_text("rollout: {backend: native:d1, agent: {turn_discount: 0.5}}\n")
    with MetricsFile(logs / "metrics.jsonl", "run") as metrics:
        for step in range(1, 41):
            values = {
                "train/reward": 0.9 - 0.8 * 0.93**step + 0.05 * np.sin(step),
                "train/loss": 0.5 / step,
                LAG: step % 3 / 2,
            }
            metrics.write(step, values if step != 20 else {"train/reward": float("nan")})

    async def make() -> None:
        url = store_url(run / "store.sqlite")
        async with await open_store(url) as store:
            await fill(store)
        async with await open_store(
            url, clock=lambda: time.time() + 3600
        ) as ahead:  # alive however slow the machine is
            await ahead.registry.heartbeat(WORKER)

    asyncio.run(make())
    return run


@dataclass
class Site:
    odd = ODD
    url: str
    token: str

    def ask(
        self, path: str, *, host: str | None = None, token: str | None = "", method: str = "GET"
    ) -> tuple[int, Any, Any]:
        """(status, headers, body); token "" means the right one, as a header."""
        request = urllib.request.Request(self.url + path, method=method)
        if host is not None:
            request.add_header("Host", host)
        if token is not None:
            request.add_header("Authorization", f"Bearer {token or self.token}")
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.headers, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers, error.read()

    def get(self, path: str, **query: object) -> Any:
        status, _, body = self.ask(f"{path}?{urllib.parse.urlencode(query)}")
        assert status == 200, body
        return json.loads(body)


@pytest.fixture(scope="session")
def site(run_folder: Path) -> Iterator[Site]:
    server = subprocess.Popen(
        [sys.executable, "-m", "areal.dashboard", "--run", str(run_folder)], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    found = re.fullmatch(r"dashboard: (http://127\.0\.0\.1:\d+)/\?token=(\S{20,})\n", server.stdout.readline())
    assert found is not None
    yield Site(found[1], found[2])
    server.terminate()
    assert server.wait(60) == 0
    server.stdout.close()
