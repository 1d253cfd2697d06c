"""The loop: read this first. Batches come from the store as agents finish them; every step makes a new version.

    python -m areal.train --config examples/math_agent/config.yaml total_train_steps=20
    with PPOTrainer(config) as trainer:        # the same from Python, see examples/openclaw/train.py
        trainer.train()

Sessions come and go on their own: gateway, workers and inference servers never wait for this loop, and it never waits for
the slowest session, only for `train_dataset.batch_size` finished groups that are fresh enough. A batch is consumed in the
store by the same transaction that publishes the version it made, so a crash at any point trains nothing twice.
The parts are put together in assemble.py; what each does stands in its own header.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from areal.base.errors import ProcessDied
from areal.base.logs import Log, announce, open_log, warn
from areal.base.types import Version
from areal.cluster.run_folder import RunFolder
from areal.cluster.scheduler import unless_a_process_dies
from areal.config.run import RunConfig
from areal.config.startable import refuse_unstartable
from areal.models.torch_install import check_torch
from areal.rollout.account import settle
from areal.rollout.batch import Batch
from areal.rollout.recovery import Lives
from areal.rollout.report import RolloutReporter
from areal.tools.books import faults_of, log_sums, refuse
from areal.tools.summary import finish

if TYPE_CHECKING:
    from areal.assemble import Run


async def train(run: Run) -> None:
    """The whole run, from its first step to total_train_steps, or until somebody asks it to stop."""
    reporting = RolloutReporter(
        run.store, run.gate, run.metrics, on_counts=run.progress.counts, trains=run.learner is not None
    )
    async with reporting as rollouts:
        if run.learner is None:
            return await record(run)
        learner = run.learner
        await evaluate(run, run.first_step)
        for step in range(run.first_step, run.config.total_train_steps):
            started = time.monotonic()
            batch = await run.unless_stopped(run.batcher.next_batch())
            if batch is None:
                break
            waited = time.monotonic() - started
            await rollouts.catch_up()
            stats = await learner.nets.train(
                batch.groups, step=step, current_version=batch.weights.label, lags=batch.lags
            )
            await settle(run.store.training, batch)
            version = await learner.publisher.publish(consumed=batch.group_ids)
            run.advisor.trained(time.monotonic() - started - waited, groups=len(batch.groups))
            report(
                run, step, batch, version, stats | {"wait_seconds": waited, "step_seconds": time.monotonic() - started}
            )
            rollouts.trained(step)
            await run.advisor.report_if_due(step)
            await learner.snapshots.save_if_due(version, len(batch.groups))
            if run.evaluation.due(step + 1):
                await evaluate(run, step + 1)
        await run.store.training.take(run.gate.current, {})  # stopped or done: no step owns anything
        run.dispatcher.stop_feeding()
        await run.gate.close_admission()
        await run.advisor.report(run.gate.current.step - 1)
        await evaluate(run, run.gate.current.step, last=True)
        await learner.snapshots.save(run.gate.current)


async def record(run: Run) -> None:
    """No model to train: sessions are recorded and kept, and make room for the next, until somebody asks to stop."""
    announce("RLTrainer", "actor.path is empty: sessions are recorded and nothing is trained; stop with Ctrl-C")
    while await run.unless_stopped(run.batcher.set_aside("not_trained")) is not None:
        pass


async def evaluate(run: Run, step: int, *, last: bool = False) -> None:
    """Held-out tasks, greedy, as sessions that are never trained. The curve starts before the first step."""
    if (
        run.stopping.is_set()
        or run.evaluation.last_step == step
        or (step > 0 and not last and not run.evaluation.due(step))
    ):
        return
    trying = run.evaluation.run(step)
    reward = await (
        trying if last else run.unless_stopped(trying)
    )  # at the end nobody feeds whose failure could end it
    if reward is not None:
        Log("eval").line(step=step, reward=reward, tasks=run.evaluation.tasks, version=run.gate.current.label)
        run.metrics.write(step, {"eval/reward": reward})


def report(run: Run, step: int, batch: Batch, version: Version, stats: dict[str, float]) -> None:
    """One step in its history, in the log, in metrics.jsonl and on the display; the same numbers everywhere."""
    run.history.write(batch, step=step, made=version)
    rate = run.pace.step(time.monotonic(), sessions=batch.sessions, tokens=batch.recorded_tokens)
    rates = {"samples_per_second": rate.sessions, "tokens_per_second": rate.tokens}
    unusual = {
        "rewards_clipped": batch.rewards_clipped,
        "stale_groups": batch.stale_groups,
        "held_seconds": batch.held_seconds,
        "servers_out": len(run.learner.publisher.out) if run.learner else 0,
    }
    Log("train").line(
        step=step,
        updated=batch.sessions,
        loss=stats["loss"],
        reward=batch.reward,
        lag_mean=batch.lag_mean,
        lag_max=batch.lag_max,
        version=version.label,
        grad_norm=stats["grad_norm"],
        logprob_gap_max=stats["logprob_gap_max"],
        wait_seconds=stats["wait_seconds"],
        step_seconds=stats["step_seconds"],
        **{name: number for name, number in unusual.items() if number},
    )
    if (step + 1) % run.config.stats_logger.log_interval == 0:
        Log("throughput").line(step=step, **rates)
    own = {"reward": batch.reward, "lag_mean": batch.lag_mean, "lag_max": batch.lag_max, "version": version.label}
    own |= {"sessions": batch.sessions, "recorded_tokens": batch.recorded_tokens, **unusual}
    logged = {f"train/{name}": value for name, value in (own | stats).items()}
    run.metrics.write(step, logged | {f"throughput/{name}": value for name, value in rates.items()})
    run.progress.step(
        step + 1,
        reward=batch.reward,
        loss=stats["loss"],
        version=version.label,
        lag=batch.lag_max,
        tokens_per_second=rate.tokens,
    )
    if not batch.rewarded:
        warn(
            "RLTrainer",
            f"nobody rewarded any of the {batch.sessions} sessions of step {step}, so all of them count 0; rewards are set with "
            "POST /rl/set_reward",
        )
    if stats["logprob_gap_max"] > 1e-3 and run.config.actor.dtype == "float32" == run.config.rollout.native.dtype:
        warn("RLTrainer", f"trainer and sampler disagree by {stats['logprob_gap_max']:.2g} in the log-prob of a token")


class PPOTrainer:
    """A run as a context manager: `with PPOTrainer(config) as trainer: trainer.train()`.

    Entering checks the configuration (ConfigError); train() starts every process, trains, and stops them all again."""

    def __init__(self, config: RunConfig, output_dir: str | None = None) -> None:
        self.config = config
        self.folder = RunFolder.of(
            config.cluster.fileroot,
            config.experiment_name,
            config.trial_name,
            output_dir,
            config.stats_logger.log_dir,
        )
        self._run: Run | None = None  # the last that was up

    def __enter__(self) -> Self:
        refuse_unstartable(self.config)
        check_torch()
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def train(self) -> None:
        """Run to the end; where a process dies, from the last recovery state once more. Raises ArealError with the reason if that does not
        help or a step cannot be applied, KeyboardInterrupt where a signal ended it at once; every process is stopped by then."""
        self.folder.create()
        config, lives = self.config, Lives(self.config.recover, self.folder.checkpoints)
        run_id = self.folder.run_id(f"{config.experiment_name}/{config.trial_name}/{secrets.token_hex(4)}")
        with open_log(self.folder.logs / "train.log", run_id=run_id):
            while True:
                try:
                    return asyncio.run(self._train(run_id))
                except asyncio.CancelledError:
                    raise KeyboardInterrupt from None
                except ProcessDied as reason:
                    if self._run is None or self._run.stopping.is_set() or not lives.again():
                        raise
                    warn("RLTrainer", f"{reason}\nThe run begins again from its last recovery state: {lives}")

    async def _train(self, run_id: str) -> None:
        # torch comes with it: --help and a wrong configuration do not wait for that
        from areal.assemble import assemble

        signals = _Signals()
        where = self._run.gateway_url if self._run is not None else ""
        async with assemble(self.config, self.folder, run_id, gateway_was_at=where) as run:
            signals.run = self._run = run
            kept = run.learner.publisher.kept if run.learner is not None else ()
            await unless_a_process_dies(train(run), run.scheduler, spared=kept)
            books = await run.store.reading.balance()
            if run.learner is not None:
                finish(run.folder, books)
            log_sums(books)
            refuse(faults_of(books, run.folder.metrics()))


class _Signals:
    """SIGINT and SIGTERM. While the parts still start, the first ends everything at once. Later the first lets the step
    finish, saves and ends; the second ends at once (nothing finished is lost either way)."""

    def __init__(self) -> None:
        self.run: Run | None = None  # once it is up
        self._main = asyncio.current_task()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._asked_to_stop)

    def _asked_to_stop(self) -> None:
        assert self._main is not None
        if self.run is None or self.run.stopping.is_set():
            announce(
                "RLTrainer", "stopping at once; the same command goes on from the last checkpoint, or begins again"
            )
            self._main.cancel()
            return
        announce("RLTrainer", "stopping after this step; once more to stop at once")
        self.run.stopping.set()


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m areal.train`: exit 0 done, 1 failed with a reason, 2 a wrong configuration, 130 cut short."""
    from areal.config.command_line import run_from_command_line

    return run_from_command_line(sys.argv[1:] if argv is None else list(argv), PPOTrainer)


if __name__ == "__main__":
    sys.exit(main())
