"""Computing activations again changes nothing where layers exchange tokens, heads, experts or stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.parallel.page import twin_case, write_net
from tests.engine.parallel.pool import Pool, alone
from tests.engine.parallel.twins import assert_twins

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
def test_a_layout_trains_as_one_process_that_keeps_everything(
    pool: Pool, tmp_path: Path, backend: str, kind: str
) -> None:
    case = twin_case(backend, write_net(tmp_path, experts="e2" in backend), gradient_checkpointing=kind)
    keeps = twin_case("archon:d1" if "archon" in backend else "fsdp:d1", tmp_path)
    assert_twins(pool.run(case), alone(keeps))
