"""What is trained is what was sampled: log-probs of every version, and lag 0 against a plain sequential loop, bit for bit.

The systems under test are whole: real processes over real sockets, assembled as `areal train` assembles them.
"""

from __future__ import annotations

import asyncio
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from areal.algorithms import ALGORITHMS
from areal.assemble import Run, assemble
from areal.base.types import GenerateRequest, Group, SamplingParams, Span, TokenChunk, Trajectory
from areal.chat import load_renderer
from areal.cluster.run_folder import RunFolder
from areal.config.algorithms import resolved
from areal.config.load import load_config
from areal.config.run import RunConfig
from areal.engine.credit import Credit
from areal.engine.engine import TrainEngine
from areal.engine.settings import EngineSettings
from areal.inference.native.engine import Engine
from areal.inference.native.server import ServerSpec, build_engine
from areal.models.dense import DenseNet
from areal.models.fetch import resolve
from areal.proxy.recorder import rng_seed
from areal.rollout.account import settle
from areal.rollout.datasets import Task, endless
from areal.rollout.task_files import read_tasks

STEPS = 3
SAMPLES = 4
GROUPS = 3


class Rambling:
    """Asks a random net for a long answer, which new weights will overtake."""

    async def run(self, task: dict[str, Any], *, base_url: str, api_key: str) -> float:
        from openai import AsyncOpenAI

        async with AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=120) as client:
            answer = await client.chat.completions.create(
                model="default",
                messages=[{"role": "user", "content": f"{task['x']}+{task['y']}="}],
                max_tokens=task.get("tokens", 90),
            )
        return (sum(map(ord, answer.choices[0].message.content or "")) % 7) / 7


def settings(tmp_path: Path, *overrides: str) -> tuple[RunConfig, RunFolder]:
    config = load_config(
        Path("configs/tiny.yaml"),
        [
            f"cluster.fileroot={tmp_path}",
            "rollout.agent.gateway_port=0",
            "evaluator.path=null",
            f"gconfig.n_samples={SAMPLES}",
            f"train_dataset.batch_size={GROUPS}",
            *overrides,
        ],
    )
    folder = RunFolder.of(str(tmp_path), "tiny", "exact", None, None)
    folder.create()
    return config, folder


async def steps(run: Run, n: int, keep: Path | None = None, first: int = 0) -> list[str]:
    """The loop of train.py without its reports; keep: folder for a model of every version, named by its label.

    Returns the sessions it trained."""
    learner = run.learner
    assert learner is not None
    sessions: list[str] = []
    for step in range(first, first + n):
        batch = await run.batcher.next_batch()
        sessions += batch.accounts
        await learner.nets.train(batch.groups, step=step, current_version=run.gate.current.label, lags=batch.lags)
        if keep is not None:
            await learner.nets.save(str(keep / str(run.gate.next_version().label)), step=step, full=False)
        await settle(run.store.training, batch)
        await learner.publisher.publish(consumed=batch.group_ids)
    return sessions


async def talk(run: Run, sessions: list[str]) -> None:
    """Eval sessions without a pause, so that every swap finds requests in mid-answer, however slow the trainer is."""
    for k in count():
        tasks = [Task(f"talk-{n}", {"x": n, "y": k % 10, "tokens": 400}) for n in range(3)]
        sessions += [outcome.session_id for outcome in await run.dispatcher.evaluate(tasks, label=str(k))]


async def test_every_recorded_logprob_is_that_of_the_version_it_names_also_across_a_swap_in_mid_request(
    tmp_path,
) -> None:
    config, folder = settings(
        tmp_path,
        "actor.path=tiny-qwen3",
        "rollout.agent.path=tests.e2e.test_exactness:Rambling",
        "rollout.max_head_offpolicyness=2",
        "gconfig.max_new_tokens=90",
        "actor.optimizer.lr=1e-3",
        "train_dataset.batch_size=2",
    )
    async with asyncio.timeout(300), assemble(config, folder, "tiny/exact") as run:
        talked: list[str] = []
        talking = asyncio.create_task(talk(run, talked))
        trained: list[str] = []
        for first in range(0, 40, 10):  # a request is long, and yet all swaps of a round may fall between two of them
            trained += await steps(run, 10, keep=tmp_path / "versions", first=first)
            interactions = [
                one for session in trained + talked for one in await run.store.sessions.interactions(session)
            ]
            mixed = [one for one in interactions if len(set(one.completion.versions.tolist())) > 1]
            if mixed:
                break
        assert not talking.done()
        talking.cancel()
        assert (await run.store.reading.balance()).faults == ()  # in the middle of everything
    assert mixed, "no request lived through a swap"
    base = resolve("tiny-qwen3")
    worst = 0.0
    for one in interactions:
        ids = torch.from_numpy(np.concatenate([one.prompt_ids, one.completion.token_ids]).astype(np.int64))
        for label in set(one.completion.versions.tolist()):
            model = _model(base if label == 0 else tmp_path / "versions" / str(label))
            with torch.no_grad():
                scores = model(ids[None]).logits[0, len(one.prompt_ids) - 1 : -1].log_softmax(-1)
            own = scores.gather(1, ids[len(one.prompt_ids) :, None])[:, 0].numpy()
            here = one.completion.versions == label
            worst = max(worst, float(np.abs(own - one.completion.logprobs)[here].max()))
    assert worst < 1e-3


_models: dict[Path, Any] = {}


def _model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    if folder not in _models:
        _models[folder] = AutoModelForCausalLM.from_pretrained(folder).eval()
    return _models[folder]


async def test_lag_0_is_bit_equal_to_a_plain_sequential_loop(tmp_path) -> None:
    config, folder = settings(
        tmp_path, "rollout.max_head_offpolicyness=0", "rollout.native.deterministic=true", "rollout.native.threads=1"
    )
    async with asyncio.timeout(120), assemble(config, folder, "tiny/exact") as run:
        await steps(run, STEPS)
        assert run.learner is not None
        await run.learner.nets.save(str(tmp_path / "service"), step=STEPS, full=False)
        assert (await run.store.training.counts()).dropped == {}
        assert (await run.store.reading.balance()).faults == ()
    TrainLoop(config).run(tmp_path / "plain")
    ours, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("service", "plain"))
    start = load_file(resolve(config.actor.path) / "model.safetensors")
    assert any(not torch.equal(start[name], plain[name]) for name in plain), "nothing was trained"
    assert [name for name in plain if not torch.equal(ours[name], plain[name])] == []


class TrainLoop:
    """Generate, reward, train, swap; one after the other in one process, without gateway, store, threads or sockets."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        model_dir = resolve(config.actor.path)
        native = config.rollout.native.model_dump(exclude={"threads"})
        self.sampler: Engine = build_engine(ServerSpec(model_dir=str(model_dir), threads=1, **native))
        self.trainer = TrainEngine.load(
            EngineSettings.of(
                resolved(config),
                model_dir=str(model_dir),
                threads=1,
                total_steps=config.total_train_steps,
                seed=config.seed,
                deterministic=True,
            )
        )
        self.renderer = load_renderer(model_dir)
        own = read_tasks(config.train_dataset.path or "")
        self.tasks = endless(own, seed=config.seed, shuffle=config.train_dataset.shuffle)

    def run(self, target: Path) -> None:
        for step in range(STEPS):
            tasks = sorted(islice(self.tasks, GROUPS), key=lambda task: task.id)
            groups = tuple(
                Group(str(k), task.id, tuple(self.sample(task, n) for n in range(SAMPLES)))
                for k, task in enumerate(tasks)
            )
            rows = Credit(ALGORITHMS["grpo"]).rows(groups)
            self.trainer.train_step(rows, step=step, current_version=step)
            self.trainer.save(str(target), step=step, full=False)
            self.sampler.swap(
                DenseNet.load(
                    target, dtype=torch.float32, device=torch.device("cpu"), positions=self.sampler.settings.max_context
                ),
                step + 1,
            )
        torch.use_deterministic_algorithms(False)

    def sample(self, task: Any, n: int) -> Trajectory:
        from areal.base.types import Message

        prompt = self.renderer.render([Message("user", f"{task.data['x']}+{task.data['y']}=")]).ids
        sampling = SamplingParams(
            max_tokens=self.config.gconfig.max_new_tokens,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            stop_token_ids=self.renderer.tokenizer.eos_ids,
        )
        seed = rng_seed(self.config.seed, task.id, n, 0, 0)
        self.sampler.add(
            self.sampler.sequence_of(GenerateRequest(f"{task.id}/{n}", f"{task.id}/{n}", prompt, sampling, seed))
        )
        chunks: list[TokenChunk] = []
        while self.sampler.busy:
            for _, event in self.sampler.step():
                assert isinstance(event, TokenChunk), event
                chunks.append(event)
        output = np.concatenate([chunk.token_ids for chunk in chunks], dtype=np.int32)
        text = self.renderer.tokenizer.decode(output.tolist())
        right = f"{task.data['x'] + task.data['y']:02d}"
        reward = float(chunks[-1].finish_reason == "stop" and text == right)
        start, n_all = len(prompt), len(prompt) + len(output)
        sampled = np.arange(n_all) >= start
        pad = lambda values, empty: np.concatenate([np.full(start, empty, values.dtype), values])  # noqa: E731
        return Trajectory(
            task_id=task.id,
            session_id=f"{task.id}/{n}",
            token_ids=np.concatenate([prompt, output]),
            trained=sampled,
            logprobs=pad(np.concatenate([chunk.logprobs for chunk in chunks], dtype=np.float32), 0),
            versions=pad(np.concatenate([chunk.versions for chunk in chunks], dtype=np.int32), -1),
            temperatures=np.ones(n_all, np.float32),
            spans=(Span("answer", start, n_all, reward, reward, True),),
        )
