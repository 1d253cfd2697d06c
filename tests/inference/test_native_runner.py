"""The engine's thread as a Backend: what happens when it breaks, is closed, or is asked from cancelled tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areal.base.errors import BackendError, Unavailable
from areal.base.types import GenerateRequest, SamplingParams, TokenChunk
from areal.inference.native.engine import Engine
from areal.inference.native.runner import NativeBackend, receive_through
from areal.inference.native.scheduler import EngineSettings
from areal.models.dense import DenseNet
from areal.models.tiny import write_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("net")
    write_tiny(folder)
    return folder


def backend_of(folder: Path, *, positions: int = 256, **settings: Any) -> NativeBackend:
    net = DenseNet.load(folder, dtype=torch.float32, device=torch.device("cpu"), positions=positions)
    engine = Engine(net, version=0, settings=EngineSettings(max_context=256, **settings), eos_ids=frozenset())
    return NativeBackend(engine, name="tiny", receive=receive_through(folder), threads=1)


def request(prompt: int, **sampling: Any) -> GenerateRequest:
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": 5, **sampling})
    return GenerateRequest("r", "s", np.full(prompt, 5, np.int32), params, 0)


async def collect(backend: NativeBackend, wanted: GenerateRequest) -> list[TokenChunk]:
    async with aclosing(backend.generate(wanted)) as chunks:
        return [chunk async for chunk in chunks]


async def exhaust(chunks: AsyncIterator[TokenChunk]) -> None:
    async for _ in chunks:
        pass


async def test_when_the_engine_breaks_every_stream_hears_of_it_and_so_does_the_process(folder: Path) -> None:
    backend = backend_of(folder, positions=32)  # a rotation table shorter than the context: the forward pass fails
    with pytest.raises(BackendError, match="the engine broke: IndexError"):
        await collect(backend, request(40))
    with pytest.raises(IndexError):
        await backend.stopped
    with pytest.raises(Unavailable, match="has stopped"):
        await collect(backend, request(3))
    with pytest.raises(Unavailable, match="has stopped"):
        await backend.pause()
    await backend.close()


async def test_closing_ends_open_streams_with_a_retriable_error(folder: Path) -> None:
    backend = backend_of(folder)
    async with aclosing(backend.generate(request(3, max_tokens=250))) as chunks:
        await anext(chunks)
        await backend.pause()
        await backend.close()
        with pytest.raises(Unavailable, match="shutting down"):
            await exhaust(chunks)
    await backend.close()


async def test_a_task_cancelled_at_any_moment_leaves_nothing_behind(folder: Path) -> None:
    backend = backend_of(folder, max_batch=4)
    tasks = [asyncio.create_task(collect(backend, request(20 + i, max_tokens=200))) for i in range(12)]
    for task in tasks:
        await asyncio.sleep(0.002)
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    chunks = await collect(backend, request(7))
    assert len(chunks) == 5
    health = await backend.health()
    assert (health.running, health.waiting, health.kv_tokens_free) == (0, 0, 65536)
    await backend.close()


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        ({"transfer": "carrier-pigeon", "version": 1}, "carrier-pigeon"),
        ({"version": 1}, "unknown"),
        ({"transfer": "disk", "version": 2}, "version 2, not 1"),
        ({"transfer": "disk", "version": 1, "path": "/etc", "files": []}, "version 0 stays"),
    ],
)
async def test_T065_a_manifest_that_leads_nowhere_changes_nothing(
    folder: Path, manifest: dict[str, Any], said: str
) -> None:
    backend = backend_of(folder)
    before = await collect(backend, request(9))
    with pytest.raises(BackendError, match=said):
        await backend.load_weights(manifest, 1)
    after = await collect(backend, request(9))
    assert [int(c.token_ids[0]) for c in before] == [int(c.token_ids[0]) for c in after]
    assert {int(c.versions[0]) for c in after} == {0}
    await backend.close()
