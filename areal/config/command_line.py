"""The command line of a training run: flags, overrides, and what a wrong configuration ends with.

    python -m areal.train --config config.yaml --output-dir ./checkpoints/run_001 actor.optimizer.lr=1e-6
    python -m areal.train --config config.yaml --dry-run        # the resolved tree, secrets masked

Exit codes: 0 done, 1 failed with a reason, 2 a wrong configuration (one line per problem, never a traceback), 130
interrupted. Used by train.py and by the examples' train.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from areal.base.errors import ArealError, ConfigError
from areal.base.redact import redact
from areal.config.algorithms import filled_in
from areal.config.load import resolve
from areal.config.run import RunConfig
from areal.config.show import masked_yaml
from areal.config.startable import why_not

# A full disk, a file without the rights for it: as in the run's other processes.
ENDINGS = (ArealError, OSError, KeyboardInterrupt)


class Trainer(Protocol):
    """What a run is to this module."""

    def train(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Command:
    """A parsed command line. Nothing has started yet."""

    config: RunConfig
    notes: tuple[str, ...]
    output_dir: str | None
    dry_run: bool


def parse(argv: Sequence[str]) -> Command:
    """Raises ConfigError with all problems; `--help` and wrong flags end the process as argparse does (0 and 2)."""
    parser = _parser()
    flags, rest = parser.parse_known_args(list(argv))
    strange = [word.partition("=")[0] for word in rest if word.startswith("-")]
    if strange:
        parser.error(f"unknown flag {strange[0]}; keys of the configuration are written without dashes: key.sub=value")
    agent_config = Path(flags.agent_config) if flags.agent_config else None
    path = Path(flags.config) if flags.config else None
    resolved = resolve(path, [*flags.overrides, *rest], agent_config=agent_config)
    return Command(resolved.config, resolved.notes, flags.output_dir, flags.dry_run)


def load_command_line(argv: Sequence[str]) -> RunConfig:
    """The configuration of `--config FILE key=value …`; ends the process on a problem (2) and after --dry-run (0)."""
    with errors_as_sentences():
        command = parse(argv)
    if command.dry_run:
        show(command)
        sys.exit(0)
    _say_notes(command)
    return command.config


def run_from_command_line(
    argv: Sequence[str], trainer: Callable[[RunConfig, str | None], AbstractContextManager[Trainer]]
) -> int:
    """Parse, then show or run. Returns the exit code."""
    try:
        command = parse(argv)
        if command.dry_run:
            show(command)
            return 0
        _say_notes(command)
        with trainer(command.config, command.output_dir) as run:
            run.train()
    except ENDINGS as error:
        return _ended_by(error)
    return 0


@contextmanager
def errors_as_sentences() -> Iterator[None]:
    """For a program of one's own around a run: what ends it is said in a line instead of a traceback, with this module's exit codes."""
    try:
        yield
    except ENDINGS as error:
        sys.exit(_ended_by(error))


def show(command: Command) -> None:
    """The resolved tree on stdout; on stderr the notes, what open keys mean, and what would keep it from starting."""
    print(masked_yaml(command.config), end="")
    _say_notes(command)
    if command.config.actor.path:
        print(f"note: {filled_in(command.config)}", file=sys.stderr)
    for reason in why_not(command.config):
        print(f"would not start: {redact(reason)}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="areal train",
        description="Run a training service until total_train_steps.",
        epilog="Keys and their meaning: docs/config.md",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file; without one the defaults and the overrides hold")
    parser.add_argument("--agent-config", metavar="FILE", help="Python file with AGENT_CONFIG (implies online mode)")
    parser.add_argument(
        "--output-dir", metavar="DIR", help="run folder; default <cluster.fileroot>/<experiment>/<trial>"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved configuration, secrets masked, and end"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key.sub=value", help="overrides, as in actor.optimizer.lr=1e-6"
    )
    return parser


def _say_notes(command: Command) -> None:
    for note in command.notes:
        print(f"note: {redact(note)}", file=sys.stderr)


def _say_error(error: ArealError | OSError) -> None:
    text = str(error) if isinstance(error, ArealError) else f"{type(error).__name__}: {error}"
    for line in redact(text).splitlines():
        print(line if line.startswith("error: ") else f"error: {line}", file=sys.stderr)  # a child's own words stay


def _ended_by(error: ArealError | OSError | KeyboardInterrupt) -> int:
    """Says it; returns the exit code."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    _say_error(error)
    return 2 if isinstance(error, ConfigError) else 1
