"""What a run came to: pictures, summary.json and a few lines for the terminal.

    finish(folder, books)     # reward.png, loss.png, summary.json in the run folder

The numbers are read back from metrics.jsonl and the store's books, so the summary says what was logged and stored and nothing else.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from areal.base.atomic import write_atomic
from areal.base.logs import announce
from areal.base.metrics import MetricsTable
from areal.cluster.run_folder import RunFolder
from areal.store.balance import Balance


def finish(folder: RunFolder, books: Balance) -> dict[str, Any]:
    """Draw, write, announce; returns the summary. books: where everything recorded went."""
    from areal.tools.plot_metrics import draw  # brings matplotlib, which a run needs only now

    table = folder.metrics()
    summary = summarise(table) | {"checkpoint": _checkpoint(folder), "accounts": msgspec.to_builtins(books)}
    pictures = [
        pair for pair in (("train/reward", "reward.png"), ("train/loss", "loss.png")) if table.series(pair[0]).steps
    ]
    for metric, file in pictures:
        draw([folder.root], metric, folder.root / file)
    write_atomic(folder.root / "summary.json", json.dumps(summary, indent=2).encode() + b"\n")
    announce("RLTrainer", _sentence(summary))
    announce("RLTrainer", f"{'pictures, ' if pictures else ''}summary.json and the checkpoint are in {folder.root}")
    return summary


def summarise(table: MetricsTable) -> dict[str, float | int | str | None]:
    """First and last values of what matters; None where it was not logged."""
    evaluated, trained = table.series("eval/reward"), table.series("train/reward")
    gaps = table.series("train/logprob_gap_max").values
    return {
        "steps": len(trained.steps),
        "eval_reward_before": evaluated.values[0] if evaluated.values else None,
        "eval_reward_after": evaluated.values[-1] if len(evaluated.values) > 1 else None,
        "train_reward_first": trained.values[0] if trained.values else None,
        "train_reward_last": trained.values[-1] if trained.values else None,
        "logprob_gap_max": max(gaps) if gaps else None,
        "lag_max": int(max(table.series("train/lag_max").values, default=0)),
    }


def _sentence(summary: dict[str, Any]) -> str:
    before, after = summary["eval_reward_before"], summary["eval_reward_after"]
    if isinstance(before, float) and isinstance(after, float):
        return f"held-out reward: {before:.3f} before -> {after:.3f} after {summary['steps']} steps"
    first, last = summary["train_reward_first"], summary["train_reward_last"]
    if isinstance(first, float) and isinstance(last, float):
        return f"reward of the training batches: {first:.3f} first -> {last:.3f} last of {summary['steps']} steps"
    return "no step was trained"


def _checkpoint(folder: RunFolder) -> str | None:
    pointer = folder.checkpoints / "latest"
    return str(folder.checkpoints / pointer.read_text()) if pointer.is_file() else None
