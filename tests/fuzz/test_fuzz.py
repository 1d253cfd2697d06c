"""The fuzzers, a little of each kind in every run of the tests, and a minute of them among the heavy parts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from areal.gateway.paths import ROUTES
from tests.fuzz.attacks import ATTACKS, LARGEST_BODY, repeated, written
from tests.fuzz.bursts import Bursts
from tests.fuzz.described import as_described, operations
from tests.fuzz.target import BODY_LIMIT, Target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with Target.running(tmp_path_factory.mktemp("fuzz")) as running:
        yield running


@pytest.mark.parametrize("kind", sorted(ATTACKS))
def test_no_request_breaks_the_service_or_its_records(target: Target, kind: str) -> None:
    Bursts(target, examples=60).run(kind, seed_of_burst=11)


def test_the_service_is_as_its_openapi_description_says(target: Target) -> None:
    described = operations()
    assert {one.path.removeprefix("/v1").replace("/models/{name}", "/models") for one in described} >= set(ROUTES) - {
        ""
    }
    for number, operation in enumerate(described):
        as_described(target, operation, examples=6, random_seed=number)
    target.check()


def test_lists_in_lists_stay_a_little_above_every_limit() -> None:
    items: list[object] = [{"role": "user", "content": "x"}]
    for _ in range(3):
        items = repeated([*items, items], 1000)
    assert BODY_LIMIT < len(written(items)) < 3 * LARGEST_BODY


@pytest.mark.heavy
def test_a_minute_of_fuzzing() -> None:
    """From one seed, so that what fails here fails again; `make fuzz` draws others. A process of its own: it bounds its memory."""
    done = subprocess.run([sys.executable, "-m", "tests.fuzz", "--minutes", "1", "--seed", "11"], timeout=480)
    assert done.returncode == 0
