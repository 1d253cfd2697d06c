"""The native inference server: `python -m areal.inference.native.server --spec FILE`.

The spec's own keys: `model_dir` (a folder with config.json and safetensors; needed), `version` (0, label of the first
weights), `adapter` (a folder of a LoRA adapter that the first weights have; none), `adapter_dtype` (of the net that it was trained in), `device` (cpu; or cuda, cuda:1), `host` (127.0.0.1), `port` (0 = a free one), `model` (the folder's name), and
those of rollout.native: `dtype`, `max_batch`, `max_context`, `kv_tokens`, `prefill_chunk`, `prefix_reuse`, `threads`
(0 = torch's default), `deterministic`. Reports {"url", "model", "version"} when ready. Serves the inference wire
(docs/architecture.md) through inference/app.py. If the engine breaks, the process ends with its traceback.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from areal.base.errors import ConfigError
from areal.cluster.child import ChildSpec, report_ready, run_child
from areal.inference.app import WireApp
from areal.inference.native.base_model import DTYPES, BaseModel
from areal.inference.native.engine import Engine
from areal.inference.native.grammars import Grammars
from areal.inference.native.runner import NativeBackend, receive_through
from areal.inference.native.scheduler import EngineSettings
from areal.models.dense import DenseNet
from areal.models.dense_config import read_config
from areal.models.torch_install import check_torch
from areal.web.address import bind
from areal.web.serve import serve

Positive = Annotated[int, Meta(ge=1)]


class ServerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The job's keys; limits as in config/rollout.py: NativeConfig."""

    model_dir: str
    version: int = 0
    adapter: str = ""
    adapter_dtype: str = "float32"
    device: str = "cpu"
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    model: str = ""
    dtype: str = "float32"
    max_batch: Positive = 64
    max_context: Annotated[int, Meta(ge=2)] = 2048
    kv_tokens: Annotated[int, Meta(ge=2)] = 65536
    prefill_chunk: Positive = 512
    prefix_reuse: bool = True
    threads: Annotated[int, Meta(ge=0)] = 0
    deterministic: bool = False


async def main(spec: ChildSpec) -> None:
    """Serve until SIGTERM. Raises ConfigError for a wrong spec or model; what broke the engine, if it breaks."""
    job = read_job(spec)
    check_torch()
    if job.threads:
        torch.set_num_threads(job.threads)
    sock = bind(job.host, job.port, setting="the native server's port")
    base = BaseModel(Path(job.model_dir))
    engine = build_engine(job, base)
    name = job.model or Path(job.model_dir).name
    grammars = Grammars(Path(job.model_dir), vocab_size=engine.net.config.vocab_size, eos_ids=engine.eos_ids)
    backend = NativeBackend(
        engine, name=name, receive=receive_through(spec.run_dir), threads=job.threads, grammars=grammars, base=base
    )
    stop = asyncio.Event()
    backend.stopped.add_done_callback(lambda _: stop.set())
    try:
        await serve(
            WireApp(backend, spec.run_token),
            sock,
            ready=lambda url: report_ready(spec, url=url, model=name, version=job.version),
            drain=backend.close,
            stop=stop,
            grace_s=2,
        )
    finally:
        await backend.close()
    await backend.stopped


def read_job(spec: ChildSpec) -> ServerSpec:
    """Raises ConfigError naming the key."""
    try:
        job = msgspec.convert(dict(spec.job), ServerSpec)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the native server's spec does not fit: {error}") from error
    for key, dtype in (("rollout.native.dtype", job.dtype), ("adapter_dtype", job.adapter_dtype)):
        if dtype not in DTYPES:
            raise ConfigError(f"{key}={dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
    return job


def build_engine(job: ServerSpec, base: BaseModel | None = None) -> Engine:
    """Load the model, and its adapter where there is one, and lay out the engine. Raises ConfigError."""
    config = read_config(Path(job.model_dir))
    max_context = min(job.max_context, config.max_positions, job.kv_tokens)
    settings = EngineSettings(
        max_context=max_context,
        max_batch=job.max_batch,
        kv_tokens=job.kv_tokens,
        prefill_chunk=job.prefill_chunk,
        prefix_reuse=job.prefix_reuse,
        deterministic=job.deterministic,
    )
    try:
        device = torch.device(job.device)
        if job.adapter:
            base = base or BaseModel(Path(job.model_dir))
            tensors = base.with_saved(Path(job.adapter), job.adapter_dtype)
            net = DenseNet.from_tensors(config, tensors, dtype=DTYPES[job.dtype], device=device, positions=max_context)
        else:
            net = DenseNet.load(Path(job.model_dir), dtype=DTYPES[job.dtype], device=device, positions=max_context)
    except (RuntimeError, AssertionError) as error:  # no such device, or its memory is too small
        raise ConfigError(f"{job.model_dir} cannot be loaded on device {job.device!r}: {error}") from error
    return Engine(net, version=job.version, settings=settings)


if __name__ == "__main__":
    run_child(main)
