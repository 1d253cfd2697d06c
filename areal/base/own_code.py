"""Loading the user's own Python, which may raise anything: one sentence that says what and where, in the place of our traceback.

    with own_code("agent_config.py"):
        found = runpy.run_path("agent_config.py")      # ConfigError: agent_config.py cannot be loaded: KeyError: 'TOKEN' (agent_config.py, line 3); …

For loading alone: what an agent raises while it plays is its session's business (rollout/agent_runs.py). Errors of areal's own pass
through. Used by config/agent_file.py and rollout/targets.py.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from areal.base.errors import ArealError, ConfigError

_NOT_THEIRS = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
_OURS = Path(__file__).parents[1]


@contextmanager
def own_code(name: str) -> Iterator[None]:
    """name: what is loaded, as the user wrote it. Raises ConfigError for whatever that raises, but for SystemExit and Ctrl-C."""
    try:
        yield
    except ArealError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise ConfigError(f"{name} cannot be loaded: {said}{_place(error)}; correct it there") from error


def _place(error: Exception) -> str:
    """The deepest line of theirs; empty where the text has it already, or where theirs has none."""
    if isinstance(error, SyntaxError):
        return ""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_file() and not path.is_relative_to(_OURS) and not frame.filename.startswith(_NOT_THEIRS):
            return f" ({path.name}, line {frame.lineno})"
    return ""
