"""The sums of a run in words: a table for a person, lines for the log, and the sentence a run ends with where one does not hold.

    faults = faults_of(books, read_metrics(path))         # books: Reading.balance(); its own faults, and what the trainer counted
    print(as_table(books))
    log_sums(books); refuse(faults)                       # at the end of a run

The trainer's count (train/trained_tokens of each step, made in the rank from the rows it was given) is a second witness beside the
store; steps are matched by the label of the weights they made, which is never used twice. docs/accounting.md explains the words.
Used by status.py and train.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from areal.base.errors import AccountingError
from areal.base.logs import Log, warn
from areal.base.metrics import MetricsTable
from areal.store.balance import UNITS, Amounts, Balance


def faults_of(books: Balance, metrics: MetricsTable) -> tuple[str, ...]:
    """Everything that does not add up; empty where the sums hold. A step that was not logged (yet) is not compared."""
    found = list(books.faults)
    for step, row in sorted(metrics.rows.items()):
        label, counted = row.get("train/version", math.nan), row.get("train/trained_tokens", math.nan)
        if math.isnan(label) or math.isnan(counted):
            continue
        stored = books.trained_by_version.get(int(label))
        if stored is not None and stored != counted:
            found.append(
                f"step {step} (version {int(label)}) trained {int(counted)} tokens as the trainer counts them, {stored} as the "
                "store does"
            )
    return tuple(found)


def rows_of(books: Balance) -> dict[str, Amounts]:
    """The lines of the sum by what they are called, `recorded` first; then evaluation, which is in no sum."""
    parts = {"recorded": books.recorded, "trained": books.trained}
    parts |= {f"masked ({reason})": own for reason, own in books.masked.items()}
    parts |= {f"dropped ({reason})": own for reason, own in books.dropped.items()}
    return parts | {"waiting": books.waiting, "open": books.open, "evaluation": books.evaluation}


def as_table(books: Balance) -> str:
    """recorded = the lines below it, per unit; a sum that does not hold is marked."""
    rows = rows_of(books)
    width = max(map(len, [*rows, "sum of the above"]))
    lines = [" " * width + "".join(f"{unit:>14}" for unit in UNITS)]
    for name, own in rows.items():
        lines += [_line(name, own, width)] if name != "evaluation" else []
        if name == "open" and books.awaiting_reward.sessions:
            lines[-1] += f"   ({books.awaiting_reward.sessions:,} of these sessions wait for their reward)"
    total = books.total
    marks = ["=" if getattr(total, unit) == getattr(books.recorded, unit) else "≠" for unit in UNITS]
    cells = (f"{f'{mark} {getattr(total, unit):,}':>14}" for unit, mark in zip(UNITS, marks, strict=True))
    lines.append(f"{'sum of the above':<{width}}{''.join(cells)}")
    if books.evaluation.sessions:
        lines.append(_line("evaluation", books.evaluation, width) + "   (never trained, in no sum)")
    return "\n".join(line.rstrip() for line in lines)


def log_sums(books: Balance) -> None:
    """One [account] line per unit: recorded = trained + masked + dropped + waiting + open, and each reason by itself."""
    for unit in UNITS:
        reasons = {f"masked.{reason}": own for reason, own in books.masked.items()}
        reasons |= {f"dropped.{reason}": own for reason, own in books.dropped.items()}
        facts: dict[str, Any] = {
            "unit": unit,
            "recorded": getattr(books.recorded, unit),
            "trained": getattr(books.trained, unit),
            "masked": _sum(books.masked, unit),
            "dropped": _sum(books.dropped, unit),
            "waiting": getattr(books.waiting, unit),
            "open": getattr(books.open, unit),
        }
        Log("account").line(
            **facts, **{name: getattr(own, unit) for name, own in reasons.items() if getattr(own, unit)}
        )


def refuse(faults: tuple[str, ...]) -> None:
    """Raises AccountingError with the first fault; all of them are in the log."""
    for fault in faults:
        warn("RLTrainer", f"the books do not balance: {fault}")
    if faults:
        more = f" (and {len(faults) - 1} more, see train.log)" if len(faults) > 1 else ""
        raise AccountingError(
            f"the run is saved, but its sums do not hold: {faults[0]}{more}; `areal status RUN` shows them. Please report it "
            "with the run's store: what was trained may not be what was recorded"
        )


def _sum(parts: Mapping[str, Amounts], unit: str) -> int:
    return sum(getattr(own, unit) for own in parts.values())


def _line(name: str, own: Amounts, width: int) -> str:
    return f"{name:<{width}}" + "".join(f"{getattr(own, unit):>14,}" for unit in UNITS)
