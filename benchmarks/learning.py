"""What lag does to learning, and what the decoupled objective does about it: reward curves on the tiny net. Exit code 1 on a miss.

    OMP_NUM_THREADS=1 python benchmarks/learning.py     # 50 runs, one core; then docs/learning.md, .png from docs/learning.json

Runs that docs/learning.json holds are not made again; without that file all are. Lag 0, 1, 2, 4, 8, each with naive PPO (`use_decoupled_loss: false`: clipped against the policy that sampled) and decoupled (clipped against
the policy at the start of the step, tokens weighed by proximal / behaviour), each with the same five seeds: same start, prompts
and draws of the sampler. One process: at lag k the rollouts of step s are sampled by the weights before step s - k, recorded as
interactions, made into rows, credited and trained by the product's own code. Each step takes four optimizer updates, so that there is something to
clip. The reward is exact: the probability that a sampled answer is right, mean over all 100 sums, under the current weights.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from areal.algorithms import ALGORITHMS
from areal.base.types import (
    Completion,
    GenerateRequest,
    Group,
    Interaction,
    Message,
    SamplingParams,
    Session,
    TokenChunk,
)
from areal.chat import load_renderer
from areal.config.algorithms import resolved
from areal.config.load import load_config
from areal.engine.credit import Credit
from areal.engine.engine import TrainEngine
from areal.engine.settings import EngineSettings
from areal.inference.native.engine import Engine
from areal.inference.native.server import ServerSpec, build_engine
from areal.models.dense import DenseNet
from areal.models.fetch import resolve
from areal.models.tiny import sum_answer, sum_prompt
from areal.proxy.recorder import rng_seed
from areal.rollout.batch import Recipe, collected
from areal.rollout.datasets import Task, endless
from areal.store.base import EndedGroup

LAGS = (0, 1, 2, 4, 8)
OBJECTIVES = ("naive", "decoupled")
SEEDS = (1, 2, 3, 4, 5)
DOCS = Path(__file__).resolve().parents[1] / "docs"
BEGIN, END = "<!-- written by benchmarks/learning.py -->\n", "<!-- end -->\n"
TASKS = [Task(f"{x}+{y}", {"x": x, "y": y}) for x, y in product(range(10), range(10))]
RECIPE = Recipe("individual", turn_discount=1.0)
SAMPLING = SamplingParams(max_tokens=4, temperature=1.0, top_p=1.0, top_k=0)


@dataclass(frozen=True, slots=True)
class Setting:
    """steps and their batch: groups x samples sessions, in `updates` optimizer updates. Evaluated every `every` steps."""

    steps: int = 48
    groups: int = 8
    samples: int = 8
    updates: int = 4
    lr: float = 1e-4
    every: int = 4


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    objective: str
    lag: int
    seed: int

    def __str__(self) -> str:
        return f"{self.objective} lag {self.lag} seed {self.seed}"


class Learner:
    """One run: a policy, the sampler and the weights of the last `lag` steps."""

    def __init__(self, case: Case, setting: Setting) -> None:
        model_dir, seed = resolve("tiny-qwen3-warm"), case.seed
        self._seed, self._setting = seed, setting
        config = load_config(
            Path("configs/tiny.yaml"),
            [
                f"actor.use_decoupled_loss={'true' if case.objective == 'decoupled' else 'false'}",
                f"actor.optimizer.lr={setting.lr}",
                f"actor.mini_batch_size={setting.groups * setting.samples // setting.updates}",
            ],
        )
        native = config.rollout.native.model_dump(exclude={"threads"})
        self._sampler: Engine = build_engine(ServerSpec(model_dir=str(model_dir), threads=1, **native))
        self._policy = TrainEngine.load(
            EngineSettings.of(
                resolved(config), model_dir=str(model_dir), threads=1, total_steps=setting.steps, seed=seed
            )
        )
        self._credit = Credit(ALGORITHMS["grpo"])
        self._renderer = load_renderer(model_dir)
        self._tasks = endless(TASKS, seed=seed, shuffle=True)
        self._kept: deque[tuple[int, Mapping[str, torch.Tensor]]] = deque(maxlen=case.lag + 1)
        self._keep(0)
        self._graded = self._credit.bare_rows([self._right(task) for task in TASKS])

    def run(self) -> list[float]:
        """The reward before the first step and after every `every` steps."""
        curve = [self.reward()]
        for step in range(self._setting.steps):
            self.step(step)
            if (step + 1) % self._setting.every == 0:
                curve.append(self.reward())
        return curve

    def step(self, step: int) -> dict[str, float]:
        """Sample with the weights of `lag` steps ago, train, keep the new ones."""
        label, tensors = self._kept[0]
        sampler = self._sampler
        if sampler.version != label:
            positions = sampler.settings.max_context
            config, cpu = sampler.net.config, torch.device("cpu")
            net = DenseNet.from_tensors(config, tensors, dtype=torch.float32, device=cpu, positions=positions)
            sampler.swap(net, label)
        tasks = sorted(islice(self._tasks, self._setting.groups), key=lambda task: task.id)
        rows = self._credit.rows(self._groups(tasks))
        stats = self._policy.train_step(rows, step, current_version=step, lags={label: step - label})
        self._keep(step + 1)
        return stats

    @property
    def sampled_by(self) -> int:
        """The step whose weights sampled last."""
        return self._sampler.version

    def reward(self) -> float:
        """Probability of a right answer, exact."""
        scores = self._policy.score(self._graded)
        return float(np.mean([math.exp(float(values.sum())) for values in scores]))

    def _keep(self, label: int) -> None:
        self._kept.append((label, {name: tensor.clone() for name, tensor in self._policy.named_tensors()}))

    def _groups(self, tasks: Sequence[Task]) -> list[Group]:
        """The tasks' sessions as the proxy would have recorded them, as rows."""
        chunks: dict[str, list[TokenChunk]] = {}
        prompts = {}
        for task in tasks:
            asked = Message("user", sum_prompt(task.data["x"], task.data["y"]))
            prompts[task.id] = self._renderer.render([asked]).ids
            for sample in range(self._setting.samples):
                name = f"{task.id}/{sample}"
                chunks[name] = []
                seed = rng_seed(self._seed, task.id, sample, 0, 0)
                request = GenerateRequest(name, name, prompts[task.id], SAMPLING, seed)
                self._sampler.add(self._sampler.sequence_of(request))
        while self._sampler.busy:
            for sequence, event in self._sampler.step():
                if not isinstance(event, TokenChunk):
                    raise event
                chunks[sequence.request.request_id].append(event)
        groups = []
        for task in tasks:
            names = [f"{task.id}/{sample}" for sample in range(self._setting.samples)]
            answers = {name: self._answer(name, task, prompts[task.id], chunks[name]) for name in names}
            groups.append(_group(task, answers))
        return groups

    def _answer(self, name: str, task: Task, prompt: np.ndarray, chunks: Sequence[TokenChunk]) -> Interaction:
        joined = [
            np.concatenate([getattr(chunk, part) for chunk in chunks])
            for part in ("token_ids", "logprobs", "versions", "kept_mass")
        ]
        finish = chunks[-1].finish_reason or "stop"
        text = self._renderer.tokenizer.decode(joined[0].tolist())
        right = finish == "stop" and text == sum_answer(task.data["x"], task.data["y"])
        done = Completion(*joined, temperature=1.0, finish_reason=finish)
        return Interaction(name, name, 0, prompt, done, (), Message("assistant", text), reward=float(right))

    def _right(self, task: Task) -> Group:
        """The right answer as if it had been sampled, for its log-probs to be asked."""
        prompt = self._renderer.render([Message("user", sum_prompt(task.data["x"], task.data["y"]))]).ids
        text = sum_answer(task.data["x"], task.data["y"]) + "<|im_end|>"
        ids = np.array(self._renderer.tokenizer.encode(text), np.int32)
        zeros = np.zeros(len(ids), np.float32)
        done = Completion(ids, zeros, ids, zeros, 1.0, "stop")
        answer = Interaction(task.id, task.id, 0, prompt, done, (), Message("assistant", text), reward=1.0)
        return _group(task, {task.id: answer})


def _group(task: Task, answers: Mapping[str, Interaction]) -> Group:
    sessions = tuple(
        Session(name, task.id, task.id, sample, "", "w0", "train", {}, 0.0, 0.0, "ended", 0.0, 1)
        for sample, name in enumerate(answers)
    )
    ended = EndedGroup(task.id, task.id, sessions, 0.0)
    return collected(ended, {name: (answer,) for name, answer in answers.items()}, RECIPE).group


def curves(path: Path, setting: Setting, cases: Sequence[Case]) -> dict[Case, list[float]]:
    """The curve of each case; those that `path` holds are taken from there, new ones are added to it."""
    held: dict[str, Any] = (
        json.loads(path.read_text()) if path.is_file() else {"setting": asdict(setting), "curves": {}}
    )
    if held["setting"] != asdict(setting):
        raise SystemExit(f"{path} holds figures of another setting, {held['setting']}; name another file with --json")
    for case in cases:
        if str(case) not in held["curves"]:
            held["curves"][str(case)] = [round(reward, 5) for reward in Learner(case, setting).run()]
            path.write_text(json.dumps(held, indent=0) + "\n")
            print(case, held["curves"][str(case)], flush=True)
    return {case: held["curves"][str(case)] for case in cases}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The seeds of one objective and lag against lag 0 of the same objective and seed. late: reward, mean over the last third of the
    curve and the seeds. difference: from lag 0, with the standard error of its mean over the seeds."""

    objective: str
    lag: int
    seeds: int
    late: float
    lowest: float
    difference: float
    error: float

    @property
    def holds(self) -> bool:
        return self.difference >= -2 * self.error


def verdicts(found: Mapping[Case, Sequence[float]]) -> list[Verdict]:
    def late(objective: str, lag: int) -> np.ndarray:
        own = np.array([found[case] for case in found if (case.objective, case.lag) == (objective, lag)])
        return own[:, -(own.shape[1] // 3) :].mean(axis=1)

    judged = []
    for objective, lag in product(OBJECTIVES, LAGS):
        if not any((case.objective, case.lag) == (objective, lag) for case in found):
            continue
        own = late(objective, lag)
        gaps = own - late(objective, 0)
        error = float(gaps.std(ddof=1) / math.sqrt(len(gaps))) if len(gaps) > 1 else math.nan
        judged.append(Verdict(objective, lag, len(own), float(own.mean()), float(own.min()), float(gaps.mean()), error))
    return judged


def table(judged: Sequence[Verdict]) -> str:
    lines = [
        f"| objective | lag | late reward, {judged[0].seeds} seeds | its lowest seed | minus lag 0 | within 2 standard errors |",
        "|---|---|---|---|---|---|",
    ]
    for one in judged:
        gap = "" if one.lag == 0 else f"{one.difference:+.3f} ± {one.error:.3f}"
        holds = "" if one.lag == 0 else "yes" if one.holds else "**no**"
        lines.append(f"| {one.objective} | {one.lag} | {one.late:.3f} | {one.lowest:.3f} | {gap} | {holds} |")
    return "\n".join(lines) + "\n"


def write_page(page: Path, judged: Sequence[Verdict]) -> None:
    """Put the table between the page's two marks; what people wrote around it stays."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{page} has no {BEGIN.strip()} … {END.strip()}; put them where the table goes")
    page.write_text(before + begin + table(judged) + end + after)


def draw(found: Mapping[Case, Sequence[float]], setting: Setting, picture: Path) -> None:
    """A panel for each objective, a curve for each lag: mean over the seeds, and a band of one standard error."""
    figure = Figure(figsize=(9.0, 3.6), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(OBJECTIVES), sharey=True)
    for panel, objective in zip(panels, OBJECTIVES, strict=True):
        for lag in LAGS:
            own = np.array([found[case] for case in found if (case.objective, case.lag) == (objective, lag)])
            steps = np.arange(own.shape[1]) * setting.every
            mean, error = own.mean(axis=0), own.std(axis=0, ddof=1) / math.sqrt(len(own))
            [line] = panel.plot(steps, mean, label=f"lag {lag}")
            panel.fill_between(steps, mean - error, mean + error, color=line.get_color(), alpha=0.15, linewidth=0)
        panel.set_title("clipped against the policy that sampled" if objective == "naive" else "decoupled")
        panel.set_xlabel("training step")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("probability of a right answer")
    panels[-1].legend(loc="lower right")
    figure.savefig(picture, metadata={"Software": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--json", type=Path, default=DOCS / "learning.json", help="figures; what it holds is not run again"
    )
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="the first so many of the five")
    options = parser.parse_args()
    if not 2 <= options.seeds <= len(SEEDS):
        parser.error(f"--seeds is {options.seeds}; a standard error needs 2 to {len(SEEDS)}")
    cases = [Case(objective, lag, seed) for seed, lag, objective in product(SEEDS[: options.seeds], LAGS, OBJECTIVES)]
    found = curves(options.json, Setting(), cases)
    judged = verdicts(found)
    write_page(DOCS / "learning.md", judged)
    draw(found, Setting(), DOCS / "learning.png")
    print(table(judged))
    return 0 if all(one.holds for one in judged if one.objective == "decoupled" and one.lag <= 4) else 1


if __name__ == "__main__":
    sys.exit(main())
