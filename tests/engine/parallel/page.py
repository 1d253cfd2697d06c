"""The table of twins in docs/parallel.md: every layout against one process, written by the test that measures it.

    python -m pytest --heavy -m heavy tests/engine/parallel/test_table.py --write-parallel-page
    python -m tests.engine.parallel.page                  # 16 processes, all five dimensions above 1; writes its line

A line holds the largest difference in the loss of three steps, the worst relative error of a parameter's first gradient, and the worst relative
distance of a parameter after the three steps. The numbers differ a little from machine to machine, so a line is only held to be there.
"""

from __future__ import annotations

import fcntl
import itertools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.engine.conftest import group_rows_of
from tests.engine.parallel.pool import Case, Pool, alone
from tests.engine.parallel.twins import Apart

PAGE = Path(__file__).resolve().parents[3] / "docs" / "parallel.md"
_COLUMNS = "| net | layout | processes | Δloss | gradient | weights |"
_RULE = "|---|---|---|---|---|---|"
SIXTEEN = "archon:d2t2p2c2e2"
VOCABULARY = 61


def write_net(folder: Path, *, experts: bool) -> Path:
    """A random net that every layout of the table fits: 4 layers, 4 heads, 4 KV heads, 4 experts, an untied vocabulary that 2 does not divide."""
    import transformers

    torch.manual_seed(11)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": not experts,
    }
    if experts:
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    kind = "Qwen3Moe" if experts else "Qwen3"
    config = getattr(transformers, f"{kind}Config")(**sizes)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    return folder


PLANNED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("Gemma", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
"""Families that archon does not know: what transformers calls them, and sizes beside those of the other nets."""


def write_planned(folder: Path, net: str) -> Path:
    """A random net of a family that is cut by transformers' plans."""
    import transformers

    torch.manual_seed(11)
    kind, own = PLANNED[net]
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "head_dim": 8,
        "num_hidden_layers": 4,
    }
    config = getattr(transformers, f"{kind}Config")(**sizes, num_attention_heads=4, num_key_value_heads=2, **own)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    return folder


def twin_case(backend: str, folder: Path, **settings: Any) -> Case:
    """The rows of the table: three groups of four sessions, half of them of two turns, prefixes shared, in several micro-batches."""
    rows = group_rows_of(groups=3)
    return Case(backend, str(folder), rows, settings={"max_tokens_per_mb": 64} | settings)


class Page:
    """The committed table, whose lines are held to be there, or rewritten."""

    def __init__(self, *, writing: bool, path: Path = PAGE) -> None:
        self._writing = writing
        self._path = path

    def saw(self, net: str, backend: str, processes: int, apart: Apart, *, replicas: int = 1) -> None:
        layout = f"`{backend}`" if replicas == 1 else f"`{backend}`, {replicas} replicas"
        head = f"| {net} | {layout} | {processes} |"
        if self._writing:
            self._write(head, f"{head} {apart.loss:.0e} | {apart.gradient:.0e} | {apart.weights:.0e} |\n")
        else:
            assert head in self._path.read_text("utf-8"), f"docs/parallel.md has no line {head}: --write-parallel-page"

    def _write(self, head: str, line: str) -> None:
        with self._path.open("r+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            above, _, below = file.read().partition(_RULE + "\n")
            table = list(itertools.takewhile(lambda one: one.startswith("|"), below.splitlines(keepends=True)))
            lines = {_head(one): one for one in table} | {head: line}
            order = sorted(lines, key=lambda one: (one.split("|")[1], int(one.split("|")[3]), one))
            written = "".join(lines[each] for each in order)
            file.seek(0)
            file.truncate()
            file.write(f"{above}{_RULE}\n{written}{below[len(''.join(table)) :]}")


def _head(line: str) -> str:
    return "|".join(line.split("|")[:4]) + "|"


def sixteen() -> Apart:
    """All five dimensions above 1 at once, with experts."""
    with tempfile.TemporaryDirectory() as scratch, Pool(16, timeout_s=900) as pool:
        case = twin_case(SIXTEEN, write_net(Path(scratch), experts=True))
        return Apart.of(pool.run(case), alone(replace(case, backend="archon:d1")))


if __name__ == "__main__":
    seen = sixteen()
    print(
        f"{SIXTEEN}: loss {seen.loss:.1e}, gradient {seen.gradient:.1e} ({seen.worst_gradient}), weights {seen.weights:.1e}"
    )
    Page(writing=True).saw("experts", SIXTEEN, 16, seen)
    seen.check()
