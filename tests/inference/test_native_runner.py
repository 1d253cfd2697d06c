"""The engine's thread as a Backend: what happens when it breaks, is closed, or is asked from cancelled tasks."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from areal import weights
from areal.base.errors import BackendError, Unavailable, WeightsRefused
from areal.base.types import GenerateRequest, SamplingParams, TokenChunk
from areal.inference.native.engine import Engine
from areal.inference.native.runner import NativeBackend, receive_through
from areal.inference.native.scheduler import EngineSettings
from areal.models.dense import DenseNet
from areal.models.dense_config import read_config
from areal.models.hf_weights import load_tensors
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


@pytest.fixture
def published(folder: Path, tmp_path: Path) -> Any:
    """publish(transfer, label) -> manifest, of weights that differ from the served ones."""
    config = read_config(folder)
    old = load_tensors(folder, config.parameter_shapes())
    new = {name: tensor + 0.05 for name, tensor in old.items()}
    sources = {name: weights.source(name, folder) for name in weights.TRANSFERS}
    yield lambda transfer, label: sources[transfer].publish(new.items(), label)
    for source in sources.values():
        source.close()


@pytest.mark.parametrize("transfer", list(weights.TRANSFERS))
async def test_T065_a_flipped_byte_is_refused_at_verify_by_the_name_of_its_tensor(
    folder: Path, published: Any, transfer: str
) -> None:
    backend = backend_of(folder)
    before = await collect(backend, request(9))
    manifest = published(transfer, 1)
    path = Path(manifest["path"]) / manifest["files"][0]["name"]
    with path.open("r+b") as file:
        file.seek(-3, 2)
        byte = file.read(1)[0]
        file.seek(-3, 2)
        file.write(bytes([byte ^ 1]))
    last = list(load_file(path))[-1]
    with pytest.raises(WeightsRefused, match=rf"version 0 stays: at 'verify': .*tensor {last} differs") as refused:
        await backend.load_weights(manifest, 1)
    assert refused.value.arrow == "verify"
    path.unlink()
    with pytest.raises(WeightsRefused, match=r"at 'load': .*cannot be opened") as refused:
        await backend.load_weights(manifest, 1)
    assert refused.value.arrow == "load"
    assert said(await collect(backend, request(9))) == said(before)
    assert await backend.load_weights(published(transfer, 1), 1) == 1
    assert {version for _, version in said(await collect(backend, request(9)))} == {1}
    await backend.close()


def said(chunks: list[TokenChunk]) -> list[tuple[int, int]]:
    return [(int(chunk.token_ids[0]), int(chunk.versions[0])) for chunk in chunks]


async def test_a_server_keeps_what_the_next_version_builds_on(folder: Path, published: Any) -> None:
    backend = backend_of(folder)
    first = published("delta", 1)
    assert await backend.load_weights(first, 1) == 1
    second = published("delta", 2)
    shutil.rmtree(first["path"])  # it is not read again
    assert await backend.load_weights(second, 2) == 2
    assert {version for _, version in said(await collect(backend, request(9)))} == {2}
    await backend.close()


async def test_T065_a_load_that_comes_late_changes_nothing(folder: Path, published: Any) -> None:
    """An older version after a newer one was asked for, also where the newer one failed."""
    backend = backend_of(folder)
    second, third = published("disk", 2), published("disk", 3)
    with pytest.raises(WeightsRefused, match="at 'load'"):
        await backend.load_weights(third | {"path": "/etc"}, 3)
    with pytest.raises(WeightsRefused, match="version 2 is superseded by version 3; version 0 stays"):
        await backend.load_weights(second, 2)
    assert await backend.load_weights(third, 3) == 3
    assert (await backend.health()).version == 3
    await backend.close()


@pytest.mark.parametrize("arrow", ["load", "pause"])
async def test_T065_a_load_out_of_time_names_its_arrow_and_never_labels_afterwards(
    folder: Path, published: Any, arrow: str
) -> None:
    backend = backend_of(folder)
    manifest = published("disk", 1)
    go_on = threading.Event()
    if arrow == "load":
        receive = backend._receive
        backend._receive = lambda given: go_on.wait() and receive(given)
    else:
        backend._calls.put(go_on.wait)  # a step of the engine that does not end
    with pytest.raises(
        WeightsRefused, match=rf"version 1 was still at '{arrow}' after 1 s .*version 0 stays"
    ) as refused:
        await backend.load_weights(manifest, 1, within_s=1.0)
    assert refused.value.arrow == arrow
    go_on.set()
    chunks = await collect(backend, request(5))  # the engine has gone through all that was put to it
    assert {version for _, version in said(chunks)} == {0}
    assert await backend.load_weights(manifest, 1) == 1
    await backend.close()
