"""Options of the whole test suite: `--heavy` runs what is marked heavy, `--device cuda` the numeric tests on a GPU,
`--write-clients-page` makes the tests of real agents write docs/clients.md instead of comparing with it, `--write-parallel-page` those of
parallel layouts docs/parallel.md.

`make test` runs the files in several processes (pytest-xdist: `-n 3 --dist loadfile`): a file's tests stay together, in
order, and no file may count on another one's having run. Each process has its own state folder and one thread for torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.store.postgres import Missing, PostgresServer, postgres_server

# Folders whose files take longest: begun first, so that no process is left alone with one of them at the end.
FIRST = ("e2e", "faults", "tools", "examples", "models", "engine", "rollout", "clients")

# Drawn examples are the same in every run, and no machine is too slow for them; `--hypothesis-profile explore` draws new ones.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("same", parent=settings.get_profile("explore"), derandomize=True)
settings.load_profile("same")

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: the processes share the cores


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--heavy", action="store_true", help="also run tests marked heavy (real model, other engines, long faults)"
    )
    parser.addoption("--write-clients-page", action="store_true", help="write docs/clients.md from what the tests see")
    parser.addoption("--write-parallel-page", action="store_true", help="write the table of twins in docs/parallel.md")
    parser.addoption("--device", default="cpu", help="where numeric tests put their tensors: cpu (default) or cuda")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=_rank)
    if config.getoption("--heavy"):
        return
    skip = pytest.mark.skip(reason="heavy: run with --heavy, as .ci/run does")
    for item in items:
        if "heavy" in item.keywords:
            item.add_marker(skip)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What torch draws does not depend on which tests ran before in this process."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


def _rank(item: pytest.Item) -> int:
    folder = item.path.relative_to(item.config.rootpath / "tests").parts[0]
    return FIRST.index(folder) if folder in FIRST else len(FIRST)


@pytest.fixture(scope="session", autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[None]:
    """What processes of these tests find: a state folder beside the user's own, and the areal of this tree before an installed one."""
    path = filter(None, [str(pytestconfig.rootpath), os.environ.get("PYTHONPATH")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("PYTHONPATH", os.pathsep.join(path))
        yield


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
