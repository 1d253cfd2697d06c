"""`areal <command> …`: one door to every command; each is also `python -m <module> …`.

A command's module is imported only when it is called, so that `areal --help` stays fast and free of torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

# name -> (module with `main(argv) -> int`, what it does)
COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("areal.train", "run the whole service: gateway, workers, inference servers, training"),
    "gateway": ("areal.gateway.server", "the gateway alone; a training run finds it and attaches"),
    "dashboard": ("areal.dashboard.__main__", "a local page on a run: sessions, tokens, rewards"),
    "status": ("areal.tools.status", "how a run stands, and whether everything it recorded is accounted for"),
    "replay": ("areal.replay", "make a training step again and compare it with what was recorded"),
    "export": ("areal.tools.export", "everything a run recorded, as JSON lines or Parquet"),
    "plot": ("areal.tools.plot_metrics", "a picture of any logged metric"),
    "compare": ("areal.tools.compare.__main__", "two runs beside each other: speed, what bounds it, rewards"),
    "doctor": ("areal.doctor", "run an agent once, before any training: what would be trained, and why not"),
    "plan": ("areal.tools.plan.__main__", "how a model can lie on N devices: memory, communication, layouts ranked"),
    "model": ("areal.models.fetch", "get a bundled model, print its folder"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Dispatch to a command. Unknown ones list the known ones; exit code 2. What the system refuses a command (a full disk) is one line
    and 1. Ctrl-C while a command is being loaded, or in one that has nothing to finish: 130."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0
    if arguments[0] in ("-V", "--version"):
        from areal import __version__

        print(__version__)
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"areal: unknown command {name!r}; known: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        code = importlib.import_module(COMMANDS[name][0]).main(rest)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` has seen enough
        _let_go_of_stdout()
        return 0
    except OSError as error:
        _let_go_of_stdout()
        print(f"areal {name}: {error}", file=sys.stderr)
        return 1
    return int(code or 0)


def _let_go_of_stdout() -> None:
    """What could not be written is not tried again when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _help() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items())
    return (
        "areal: reinforcement learning for LLM agents by changing one base URL\n\n"
        f"usage: areal COMMAND …\n\n{rows}\n\n`areal COMMAND --help` tells more."
    )


if __name__ == "__main__":
    sys.exit(main())
