"""Requests made from docs/openapi.json by schemathesis: what fits the description, and what just does not.

    for operation in operations(): as_described(target, operation, examples=20, seed=7)

Checked on each answer: no server error, a status, a content type and a body that the description knows; and that nothing which breaks
the schema is taken for good.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.fuzz.target import ADMIN, DEADLINE_S, Reply, Target

DESCRIPTION = Path(__file__).parents[2] / "docs" / "openapi.json"
CHECKS = [
    schemathesis.checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
ADMIN_ROUTES = ("/rl/start_session", "/rl/exclude_session", "/rl/export_trajectories", "/export_trajectories")


@cache
def operations() -> list[Any]:
    """Every operation of the description."""
    schema = schemathesis.openapi.from_dict(json.loads(DESCRIPTION.read_text("utf-8")))
    return [found.ok() for found in schema.get_all_operations()]


def as_described(target: Target, operation: Any, *, examples: int, random_seed: int) -> None:
    """Raises an AssertionError with the smallest request that shows what is wrong."""
    cases = operation.as_strategy()
    if operation.body:
        cases |= operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)

    @seed(random_seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def one(case: Any) -> None:
        target.requests += 1
        key = ADMIN if operation.path in ADMIN_ROUTES else target.key
        headers = {"Authorization": f"Bearer {key}"}
        response = case.call(base_url=target.url, headers=headers, timeout=DEADLINE_S)
        case.validate_response(response, checks=CHECKS)
        said = {name.lower(): value[0] for name, value in response.headers.items()}
        target.judge(Reply(response.status_code, said, response.content), case)

    one()
