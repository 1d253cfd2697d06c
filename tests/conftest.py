"""Options of the whole test suite: `--heavy` runs what is marked heavy, `--device cuda` the numeric tests on a GPU,
`--write-clients-page` makes the tests of real agents write docs/clients.md instead of comparing with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.store.postgres import Missing, PostgresServer, postgres_server


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--heavy", action="store_true", help="also run tests marked heavy (real model, other engines, long faults)"
    )
    parser.addoption("--write-clients-page", action="store_true", help="write docs/clients.md from what the tests see")
    parser.addoption("--device", default="cpu", help="where numeric tests put their tensors: cpu (default) or cuda")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--heavy"):
        return
    skip = pytest.mark.skip(reason="heavy: run with --heavy, as .ci/run does")
    for item in items:
        if "heavy" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """`--device`; asking for a GPU that is not there fails instead of skipping."""
    name = str(request.config.getoption("--device"))
    if name.startswith("cuda"):
        import torch

        if not torch.cuda.is_available():
            pytest.fail(f"--device {name} was asked for, but torch sees no GPU here")
    return name


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """One real server for all tests that want it; skipped with the reason where there is none."""
    try:
        with postgres_server() as server:
            yield server
    except Missing as reason:
        pytest.skip(str(reason))
