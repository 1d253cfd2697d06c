"""Fixtures of the client tests: a worker's proxy in this process (`make_service`), and a whole run with real agents around it
(`scripted_run`, `installed`, `page`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from areal.inference.scripted.script import Script, read_script
from tests.clients.installs import Agents, NotInstalled, install
from tests.clients.live_run import Run, live_run
from tests.clients.page import Page
from tests.clients.plays import PLAYS, write_script
from tests.proxy.service import eventually, make_service

__all__ = ["eventually", "make_service"]


@pytest.fixture(scope="session")
def script_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plays") / "script.jsonl"
    write_script(path, PLAYS)
    return path


@pytest.fixture(scope="session")
def script(script_path: Path) -> Script:
    """What the inference server plays; its vocabulary says which ids were sampled."""
    return read_script(script_path)


@pytest.fixture(scope="session")
def scripted_run(script_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """One run for all tests: gateway, worker and scripted server are processes of their own."""
    overrides = ["rollout.backend=scripted:d1", f"rollout.scripted.path={script_path}", "actor.path="]
    with live_run(tmp_path_factory.mktemp("clients"), overrides) as run:
        yield run


@pytest.fixture(scope="session")
def installed() -> Callable[[Agents], Path]:
    """installed(AGENTS): their folder; the test is skipped, with the reason, where they cannot be had."""

    def folder(agents: Agents) -> Path:
        try:
            return install(agents)
        except NotInstalled as reason:
            pytest.skip(str(reason))

    return folder


@pytest.fixture
def page(request: pytest.FixtureRequest) -> Page:
    return Page(writing=bool(request.config.getoption("--write-clients-page")))
