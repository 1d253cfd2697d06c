"""Every single dimension, every pair, the triples and all of t, p, c, e against one process; written into docs/parallel.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from areal.config.backend_spec import parse_backend
from tests.engine.parallel.page import PLANNED, Page, twin_case, write_net, write_planned
from tests.engine.parallel.pool import Pool, Result, alone
from tests.engine.parallel.twins import Apart

pytestmark = pytest.mark.heavy

DENSE = (
    "d2",
    "t2",
    "p2",
    "c2",
    "d4",
    "t4",
    "p4",
    "c4",
    "d2t2",
    "d2p2",
    "d2c2",
    "t2p2",
    "t2c2",
    "p2c2",
    "d2t2p2",
    "d2t2c2",
)
REPLICAS = (("dense", "fsdp:d4"), ("dense", "archon:d2c2"), ("experts", "archon:d4e2"), ("dense", "archon:d4t2"))
EXPERTS = (
    "d2",
    "t2",
    "p2",
    "c2",
    "d2e2",
    "t2e2",
    "c2e2",
    "d2t2",
    "d2p2",
    "d2c2",
    "t2p2",
    "t2c2",
    "p2c2",
    "d2p2e2",
    "d2t2e2",
    "d2c2e2",
    "t2p2e2",
    "t2c2e2",
    "p2c2e2",
    "d2t2p2",
    "d2t2c2",
    "t2p2c2e2",
)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(8) as pool:
        yield pool


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Result]]:
    """Folder and what one process makes of it, by kind and engine."""
    found = {}
    for kind in ("dense", "experts"):
        folder = write_net(tmp_path_factory.mktemp(kind), experts=kind == "experts")
        found |= {
            f"{kind} {engine}": (folder, alone(twin_case(f"{engine}:d1", folder))) for engine in ("archon", "fsdp")
        }
    for net in PLANNED:
        folder = write_planned(tmp_path_factory.mktemp(net), net)
        found[f"{net} fsdp"] = (folder, alone(twin_case("fsdp:d1", folder)))
    return found


@pytest.mark.parametrize(
    ("kind", "backend", "replicas"),
    [
        ("dense", "fsdp:d2", 1),
        ("experts", "fsdp:d2", 1),
        ("gemma", "fsdp:d1t2", 1),
        ("gemma", "fsdp:d2t2", 1),
        ("mixtral", "fsdp:d2e2", 1),
        ("mixtral", "fsdp:d2t2e2", 1),
        *(("dense", f"archon:{layout}", 1) for layout in DENSE),
        *(("experts", f"archon:{layout}", 1) for layout in EXPERTS),
        *((*each, 2) for each in REPLICAS),
    ],
)
def test_a_layout_trains_as_one_process_does(
    pool: Pool,
    nets: dict[str, tuple[Path, Result]],
    request: pytest.FixtureRequest,
    kind: str,
    backend: str,
    replicas: int,
) -> None:
    folder, expected = nets[f"{kind} {parse_backend(backend).name}"]
    apart = Apart.of(pool.run(twin_case(backend, folder, replicas=replicas)), expected)
    Page(writing=request.config.getoption("--write-parallel-page")).saw(
        kind, backend, parse_backend(backend).size, apart, replicas=replicas
    )
    apart.check()
