"""docs/troubleshooting.md out of the error guide: `python -m areal.tools.troubleshooting > docs/troubleshooting.md`.

A test keeps the page equal to base/guide, and that to what the programs say.
"""

from __future__ import annotations

import re
import sys
from itertools import groupby

from areal.base.guide import GUIDE, Situation

HEAD = """# Troubleshooting

What you meet, how the message reads (`…` stands for a value), why it comes, what to do. Every message of areal ends with its remedy; this page adds
the cause. It is generated from areal/base/guide: `python -m areal.tools.troubleshooting > docs/troubleshooting.md`.

When nothing here fits: `areal doctor --agent "…"` tries an agent without training ([doctor.md](doctor.md)), `areal status RUN` says how a run stands
([accounting.md](accounting.md)), and the run's `logs/` hold one file per process.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for part, entries in groupby(GUIDE, key=lambda one: one.part):
        parts.append(f"\n## {part}\n")
        parts += [_entry(one) for one in entries]
    return "".join(parts)


def _entry(one: Situation) -> str:
    says = re.sub(r"\{\w+\}", "…", one.says)
    return f'\n### {one.seen}\n<a id="{one.name}"></a>\n\n> {says}\n\n- **Why**: {one.cause}\n- **What to do**: {one.remedy}\n'


if __name__ == "__main__":
    sys.stdout.write(page())
