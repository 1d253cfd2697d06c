"""One question to a router, for tests of which servers answer with which weights."""

from __future__ import annotations

from contextlib import aclosing

import numpy as np

from areal.base.types import GenerateRequest, SamplingParams
from areal.inference.router import Router


async def versions_of(router: Router, number: int) -> set[int]:
    """The versions that the tokens of a new session have. number: another one for each."""
    sampling = SamplingParams(max_tokens=4, temperature=1.0)
    request = GenerateRequest(f"r{number}", f"s{number}", np.array([5, 6], np.int32), sampling, number)
    async with aclosing(router.generate(request)) as chunks:
        return {int(version) for chunk in [chunk async for chunk in chunks] for version in chunk.versions}
