"""Everything a run recorded, read back from its store: `areal export`, while the run goes on or after it.

    areal export --run runs/my-exp/trial-0 > sessions.jsonl
    areal export --run runs/my-exp/trial-0 --format parquet --output rows.parquet --style concat --only trained

JSON lines: a session a line, as `POST /rl/export_trajectories` gives it (proxy/records.py), with its account. Parquet: a training row
a row, columns in parquet_rows.py. Style, discount and clip are the run's own unless said otherwise. One session is in memory at a time;
nothing is changed, the store is opened to be read. Exit codes: 0, 2 no such run or a wrong option. docs/export.md.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import orjson

from areal.base.errors import ArealError, ConfigError
from areal.base.types import ExportStyle
from areal.config.recorded import Recorded
from areal.config.rollout import AgentConfig
from areal.proxy import records
from areal.store import open_store
from areal.store.base import SessionSummary, Store
from areal.store.location import find_store

PAGE = 100  # summaries, which are small; recordings are read one session at a time
Write = Callable[[dict[str, Any]], None]

ONLY: dict[str, Callable[[SessionSummary], bool]] = {
    "all": lambda _: True,
    "ended": lambda one: one.session.ending is not None,
    "trained": lambda one: one.trained_tokens > 0,
    "eval": lambda one: one.session.purpose == "eval",
}


@dataclass(frozen=True, slots=True)
class How:
    """Which sessions, and what rewards and rows are made of them."""

    style: ExportStyle
    discount: float
    reward_clip: float | None
    only: str = "all"


async def sessions(store: Store, how: How) -> AsyncIterator[dict[str, Any]]:
    """The sessions of a store, in the order in which they began, as JSON lines have them."""
    after = ""
    while page := await store.reading.walk(after, PAGE):
        for summary in page:
            if ONLY[how.only](summary):
                recorded = await store.sessions.interactions(summary.session.id)
                body = records.exported(summary, recorded, how.style, how.discount, how.reward_clip)
                account = {"trained": summary.trained_tokens, "masked": _masked(summary)}
                yield body | {"drop_reason": summary.drop_reason, "account": account}
        after = page[-1].session.id


async def export(run: Path, how: How, write: Write) -> int:
    """Pass every session to `write`. Returns how many there were."""
    number = 0
    async with await open_store(find_store(run), read_only=True) as store:
        async for body in sessions(store, how):
            write(body)
            number += 1
    return number


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        with _target(options.format, options.output) as write:
            number = asyncio.run(export(options.run, _how(options), write))
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ArealError as error:
        print(f"areal export: {error}", file=sys.stderr)
        return 2
    print(f"exported {number} sessions to {options.output or 'standard output'}", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="areal export", description="Everything a run recorded, as files.")
    parser.add_argument(
        "--run", type=Path, required=True, metavar="DIR", help="the run folder, of a running or ended run"
    )
    parser.add_argument(
        "--format",
        choices=("jsonl", "parquet"),
        default="jsonl",
        help="a session a line (default), or a training row a row",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: standard output (jsonl only)")
    parser.add_argument(
        "--style", choices=get_args(ExportStyle), help="how turns become training rows (default: the run's)"
    )
    parser.add_argument(
        "--discount", type=float, metavar="D", help="of rewards from turn to turn, 0 to 1 (default: the run's)"
    )
    parser.add_argument("--only", choices=tuple(ONLY), default="all", help="which sessions (default: all)")
    return parser


def _how(options: argparse.Namespace) -> How:
    config, defaults = Recorded.of(options.run / "config.yaml"), AgentConfig()
    style: Any = options.style or config.text("rollout.agent.export_style") or defaults.export_style
    discount = config.number("rollout.agent.turn_discount") if options.discount is None else options.discount
    discount = defaults.turn_discount if discount is None else discount
    if not 0 <= discount <= 1:
        raise ConfigError(f"--discount is {discount:g}; it must be from 0 to 1")
    return How(style, discount, config.number("rollout.agent.reward_clip"), options.only)


def _target(kind: str, output: Path | None) -> AbstractContextManager[Write]:
    if kind == "jsonl":
        return _lines(output)
    if output is None:
        raise ConfigError("--format parquet needs --output FILE: it is no text for a terminal")
    try:
        from areal.tools.parquet_rows import parquet
    except ImportError as error:
        raise ConfigError(
            f"Parquet needs pyarrow ({error}): pip install 'areal[parquet]', or take --format jsonl"
        ) from error
    return _whole(output, parquet)


@contextmanager
def _lines(output: Path | None) -> Any:
    if output is None:
        yield lambda body: _out(orjson.dumps(body, option=orjson.OPT_APPEND_NEWLINE))
        return
    with _whole(output, _line_file) as write:
        yield write


def _out(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


@contextmanager
def _line_file(path: Path) -> Any:
    with path.open("wb") as file:
        yield lambda body: file.write(orjson.dumps(body, option=orjson.OPT_APPEND_NEWLINE))


@contextmanager
def _whole(output: Path, opened: Callable[[Path], AbstractContextManager[Write]]) -> Any:
    """A file that is there whole or not at all, for its owner alone: it holds what users said."""
    if output.exists() and not output.is_file():  # the file would take the place of a device or a pipe
        raise ConfigError(f"{output} is no file; name one, or leave --output out for standard output")
    output = output.resolve()
    aside = output.with_name(f".{output.name}.part")
    try:
        aside.touch(0o600)
        with opened(aside) as write:
            yield write
        aside.replace(output)
    except OSError as error:
        raise ConfigError(
            f"cannot write {output}: {error.strerror}; name a file in a folder where you may write"
        ) from error
    finally:
        aside.unlink(missing_ok=True)


def _masked(summary: SessionSummary) -> dict[str, int]:
    return {reason: tokens for reason, tokens in summary.account.items() if reason}


if __name__ == "__main__":
    sys.exit(main())
