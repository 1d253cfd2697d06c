"""The native server as a real process, asked through the real client: streams, versions, pauses, swaps, aborts, refusals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

from areal import weights
from areal.base.errors import BackendError, BadRequest, ContextOverflow, WeightsRefused
from areal.base.types import GenerateRequest, SamplingParams, TokenChunk
from areal.inference import HttpBackend, connect
from areal.models.dense import DenseNet, causal
from areal.models.dense_config import read_config
from areal.models.hf_weights import load_tensors
from areal.models.tiny import write_tiny

TOKEN = "run-token"
CPU = torch.device("cpu")


class Server:
    """The process and its address."""

    def __init__(self, run_dir: Path, model_dir: Path, **job: Any) -> None:
        self.run_dir, self.model_dir = run_dir, model_dir
        ready, spec = run_dir / "ready.json", run_dir / "spec.json"
        content = {"name": "server-0", "run_dir": str(run_dir), "run_token": TOKEN, "ready_file": str(ready)}
        settings = {"model_dir": str(model_dir), "threads": 1, "max_context": 256, "version": 7, **job}
        spec.touch(mode=0o600)
        spec.write_text(json.dumps({**content, "parent_pid": os.getpid(), **settings}))
        command = [sys.executable, "-m", "areal.inference.native.server", "--spec", str(spec)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        while not ready.exists():
            if self.process.poll() is not None:
                raise RuntimeError(self.read_stderr())
            time.sleep(0.02)
        self.facts = json.loads(ready.read_text())
        self.url: str = self.facts["url"]

    def read_stderr(self) -> str:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            return stream.read()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=60)
        self.read_stderr()
        return code


def request(name: str, prompt: list[int], *, seed: int = 0, **sampling: Any) -> GenerateRequest:
    params = SamplingParams(**{"max_tokens": 20, "temperature": 1.0, **sampling})
    return GenerateRequest(name, f"session-{name}", np.array(prompt, np.int32), params, seed)


async def collect(backend: HttpBackend, wanted: GenerateRequest) -> list[TokenChunk]:
    async with aclosing(backend.generate(wanted)) as chunks:
        return [chunk async for chunk in chunks]


def joined(chunks: list[TokenChunk]) -> tuple[list[int], list[float], list[int]]:
    ids = [int(token) for chunk in chunks for token in chunk.token_ids]
    logprobs = [float(value) for chunk in chunks for value in chunk.logprobs]
    return ids, logprobs, [int(version) for chunk in chunks for version in chunk.versions]


def recompute(tensors: dict[str, torch.Tensor], folder: Path, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Log-probs of `output` by one plain forward pass over everything."""
    net = DenseNet.from_tensors(read_config(folder), tensors, dtype=torch.float32, device=CPU, positions=512)
    ids = torch.tensor(prompt + output)
    with torch.inference_mode():
        logits = net.logits(net.forward(ids, torch.arange(len(ids)), causal(net.config)))
    return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None])[:, 0]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-qwen3")
    write_tiny(folder)
    generation = {"eos_token_id": []}  # a random net would end anywhere; the tests name their own ends
    (folder / "generation_config.json").write_text(json.dumps(generation))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("run"), model_dir)
    yield server
    assert server.stop() == 0


async def test_it_reports_itself_and_streams_token_by_token(server: Server) -> None:
    backend = connect("native", server.url, TOKEN)
    health = await backend.health()
    assert (health.model, health.version, health.max_context) == (server.model_dir.name, 7, 256)
    assert {key: server.facts[key] for key in ("model", "version")} == {"model": health.model, "version": 7}
    chunks = await collect(backend, request("a", [5, 6, 7]))
    assert len(chunks) == 20
    assert [chunk.finish_reason for chunk in chunks] == [None] * 19 + ["length"]
    await backend.close()


async def test_many_concurrent_requests_all_end_with_the_log_probs_of_a_plain_forward_pass(server: Server) -> None:
    backend = connect("native", server.url, TOKEN)
    prompts = [[4 + (i * 7 + k) % 80 for k in range(1 + i % 40)] for i in range(96)]
    answers = await asyncio.gather(*[collect(backend, request(str(i), p, seed=i)) for i, p in enumerate(prompts)])
    tensors = load_tensors(server.model_dir, read_config(server.model_dir).parameter_shapes())
    for prompt, chunks in list(zip(prompts, answers, strict=True))[::8]:
        ids, logprobs, versions = joined(chunks)
        assert versions == [7] * 20
        expected = recompute(tensors, server.model_dir, prompt, ids)
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=0)
    health = await backend.health()
    assert (health.running, health.waiting, health.kv_tokens_free) == (0, 0, 65536)
    await backend.close()


async def test_leaving_a_stream_early_frees_what_it_held(server: Server) -> None:
    backend = connect("native", server.url, TOKEN)
    async with aclosing(backend.generate(request("left", [9] * 30, max_tokens=200))) as chunks:
        async for _ in chunks:
            break
    for _ in range(1000):  # the abort arrives when the server notices the closed connection
        health = await backend.health()
        if health.running + health.waiting == 0:
            break
        await asyncio.sleep(0.01)
    assert (health.running, health.waiting, health.kv_tokens_free) == (0, 0, 65536)
    await backend.close()


async def test_some_streams_of_a_batch_leave_and_the_others_stay_exact(server: Server) -> None:
    backend = connect("native", server.url, TOKEN)
    alone = joined(await collect(backend, request("alone", [3, 4], seed=5, max_tokens=60)))

    async def leave(after: int) -> None:
        async with aclosing(
            backend.generate(request(f"leaver-{after}", [9, 8, 7], seed=after, max_tokens=200))
        ) as chunks:
            for _ in range(after):
                await anext(chunks)

    stayer = asyncio.create_task(collect(backend, request("stayer", [3, 4], seed=5, max_tokens=60)))
    await asyncio.gather(*[leave(after) for after in range(1, 20)])
    stayed = joined(await stayer)
    assert stayed[0] == alone[0]
    np.testing.assert_allclose(stayed[1], alone[1], atol=1e-5)
    await backend.close()


async def test_paused_streams_wait_and_go_on(server: Server) -> None:
    backend = connect("native", server.url, TOKEN)
    stream = backend.generate(request("paused", [8, 9], max_tokens=100))
    async with aclosing(stream) as chunks:
        got = [await anext(chunks)]
        await backend.pause()
        running = asyncio.create_task(collect(backend, request("later", [3], max_tokens=5)))
        await asyncio.sleep(0.3)
        assert not running.done()
        await backend.resume()
        got += [chunk async for chunk in chunks]
    assert sum(len(chunk.token_ids) for chunk in got) == 100
    assert len(joined(await running)[0]) == 5
    await backend.close()


async def test_a_prompt_beyond_the_context_is_refused_and_max_tokens_is_clamped_to_it(server: Server) -> None:
    backend = connect("native", server.url, TOKEN)
    with pytest.raises(ContextOverflow, match="256 tokens > 255 maximum"):
        await collect(backend, request("long", [5] * 256))
    chunks = await collect(backend, request("clamped", [5] * 250, max_tokens=50))
    assert len(joined(chunks)[0]) == 6
    assert chunks[-1].finish_reason == "length"
    await backend.close()


@pytest.mark.parametrize(
    ("prompt", "sampling", "said"),
    [([4, 10**6], {}, "0..85"), ([4], {"temperature": -1.0}, "temperature"), ([4], {"top_p": 0.0}, "top_p")],
)
async def test_what_cannot_be_sampled_is_a_sentence(
    server: Server, prompt: list[int], sampling: dict[str, Any], said: str
) -> None:
    backend = connect("native", server.url, TOKEN)
    with pytest.raises(BadRequest, match=said):
        await collect(backend, request("bad", prompt, **sampling))
    await backend.close()


async def test_every_route_wants_the_run_token(server: Server) -> None:
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer wrong"}) as session:
        for method, path in (("GET", "/health"), ("POST", "/pause"), ("POST", "/load_weights")):
            async with session.request(method, server.url + path) as response:
                assert response.status == 401, path
    await connect("native", server.url, TOKEN).close()


async def test_T065_a_request_goes_on_across_a_swap_each_token_under_the_version_that_sampled_it(
    tmp_path: Path, model_dir: Path
) -> None:
    server = Server(tmp_path, model_dir, version=3)
    backend = connect("native", server.url, TOKEN)
    shapes = read_config(model_dir).parameter_shapes()
    old = load_tensors(model_dir, shapes)
    new = {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in old.items()}
    source = weights.source("disk", tmp_path)
    prompt = list(range(4, 44))
    async with aclosing(backend.generate(request("swap", prompt, max_tokens=60, seed=1))) as chunks:
        got = [await anext(chunks) for _ in range(3)]
        assert await backend.load_weights(source.publish(new.items(), 4), 4) == 4
        got += [chunk async for chunk in chunks]
    ids, logprobs, versions = joined(got)
    assert set(versions) == {3, 4}
    assert versions == sorted(versions)
    border = versions.index(4)
    for tensors, part in ((old, slice(0, border)), (new, slice(border, None))):
        expected = recompute(tensors, model_dir, prompt, ids)[part]
        torch.testing.assert_close(torch.tensor(logprobs)[part], expected, atol=1e-4, rtol=0)

    again = joined(await collect(backend, request("again", prompt, seed=1)))
    expected = recompute(new, model_dir, prompt, again[0])
    torch.testing.assert_close(torch.tensor(again[1]), expected, atol=1e-4, rtol=0)

    broken = dict(new) | {"model.norm.weight": torch.full_like(new["model.norm.weight"], torch.nan)}
    with pytest.raises(WeightsRefused, match=r"version 4 stays: at 'verify': .*model\.norm\.weight holds NaN"):
        await backend.load_weights(source.publish(broken.items(), 5), 5)
    del broken["model.norm.weight"]
    with pytest.raises(BackendError, match="lack 1 tensors"):
        await backend.load_weights(source.publish(broken.items(), 6), 6)
    assert (await backend.health()).version == 4
    assert joined(await collect(backend, request("still", prompt, seed=1))) == again
    await backend.close()
    assert server.stop() == 0


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ({"dtype": "float16"}, "rollout.native.dtype"),
        ({"max_batch": 0, "tipo": 1}, "max_batch|tipo"),
        ({"device": "cuda:99"}, "cuda:99"),
    ],
)
def test_a_spec_that_cannot_run_is_one_sentence_and_exit_code_2(
    tmp_path: Path, model_dir: Path, job: dict[str, Any], said: str
) -> None:
    with pytest.raises(RuntimeError, match=said) as failure:
        Server(tmp_path, model_dir, **job)
    assert "Traceback" not in str(failure.value)


async def test_a_grammar_travels_and_its_flags_come_back(server: Server) -> None:
    backend = connect("native", server.url, TOKEN)
    bound = replace(request("bound", [5, 6], seed=3), grammar='start: "abc" | "abd"')
    free, forced = await asyncio.gather(collect(backend, request("free", [5, 6], seed=3)), collect(backend, bound))
    assert all(chunk.constrained is None for chunk in free)
    assert len(forced) == 3  # this net has no end of its own: it stops where nothing can follow
    assert forced[-1].finish_reason == "stop"
    assert [chunk.constrained for chunk in forced] == [(True,)] * 3
    with pytest.raises(BadRequest, match="cannot be kept"):
        await collect(backend, replace(bound, grammar="start: nowhere"))
    await backend.close()
