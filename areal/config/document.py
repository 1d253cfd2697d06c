"""docs/config.md, written from the sections themselves: `python -m areal.config.document > docs/config.md`.

Every key with type, default and docstring, then the second set of names and what this version refuses. A test holds the
file to what this prints.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import get_args, get_origin

from areal.config.aliases import ALIASES, GATEWAY_CONFIG
from areal.config.keys import Key, keys_of
from areal.config.run import RunConfig
from areal.config.supported import REFUSALS

_HEAD = """# Configuration

A YAML file (`--config FILE`), then `key.sub=value` overrides on the command line; `--dry-run` prints the result with
secrets masked. Numbers are YAML 1.2 (`1e-6` is a number), text keys keep the text that was written (`010`, `no`).
`${NAME}` reads the environment, `${actor.path}` another key. A wrong configuration ends with a line per problem and exit
code 2. This page is generated: `python -m areal.config.document > docs/config.md`.
"""


def document() -> str:
    """The whole page."""
    parts = [_HEAD]
    section = None
    for key in keys_of(RunConfig).values():
        above = key.path.rpartition(".")[0]
        if above != section:
            section = above
            parts.append(f"\n## {section or 'At the top'}\n\n| key | type | default | |\n|---|---|---|---|\n")
        parts.append(
            f"| `{key.path.rpartition('.')[2]}` | {_kinds(key)} | {_default(key)} | {_cell(key.description)} |\n"
        )
    parts += ["\n## The second set of names\n\n| written | means | how |\n|---|---|---|\n", *_aliases()]
    parts += ["\n## Refused in this version\n\n| key | why |\n|---|---|\n"]
    parts += [f"| `{refusal.path}` | {_cell(refusal.reason)} |\n" for refusal in REFUSALS]
    return "".join(parts)


def _aliases() -> Iterator[str]:
    yield f"| `{GATEWAY_CONFIG}` | `api_gateway`, `model_routing` | read from that file |\n"
    for alias in ALIASES:
        names = " + ".join(f"`{name}`" for name in alias.names)
        how = f"{alias.meaning}, unless it is set itself" if alias.default else alias.meaning
        yield f"| {names} | `{alias.target}` | {how} |\n"


def _kinds(key: Key) -> str:
    words = []
    for kind in key.kinds:
        if get_origin(kind) is list:
            words.append(f"list of {'text' if get_args(kind) == (str,) else 'numbers'}")
        elif get_origin(kind) is not None:
            words += [f"`{choice}`" for choice in get_args(kind)]
        else:
            words.append(
                {"str": "text", "NoneType": "null", "int": "integer", "float": "number"}.get(kind.__name__, "bool")
            )
    return " or ".join(words)


def _default(key: Key) -> str:
    if key.default == "":
        return "empty"
    if key.default is None:
        return "null" if type(None) in key.kinds else "needed"
    if isinstance(key.default, list):
        return f"`[{', '.join(map(str, key.default))}]`"
    return f"`{str(key.default).lower() if isinstance(key.default, bool) else key.default}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(document())
