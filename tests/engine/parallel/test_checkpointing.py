"""Computing activations again changes nothing where layers exchange tokens, heads, experts or stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.parallel.page import Apart, twin_case, write_net
from tests.engine.parallel.pool import Pool, alone

pytestmark = pytest.mark.heavy


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("archon:d2t2", "full"),
        ("archon:t2p2", "selective"),
        ("archon:d2c2e2", "full"),
        ("archon:d2t2e2", "selective"),
        ("fsdp:d2", "selective"),
    ],
)
def test_a_layout_trains_as_one_process_that_keeps_everything(tmp_path: Path, backend: str, kind: str) -> None:
    case = twin_case(backend, write_net(tmp_path, experts="e2" in backend), gradient_checkpointing=kind)
    with Pool(4) as pool:
        apart = Apart.of(pool.run(case), alone(twin_case("archon:d1" if "archon" in backend else "fsdp:d1", tmp_path)))
    assert apart.loss <= 5e-6, apart
    assert apart.gradient <= 1e-5, apart
    assert apart.weights <= 1e-5, apart
