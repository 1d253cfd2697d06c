"""One pool of rank processes for all files of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.parallel.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    with Pool(16) as pool:
        yield pool
