"""docs/openapi.json is what the routes say, and names every field that a protocol knows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal.gateway.openapi import document
from areal.gateway.paths import ROUTES
from areal.proxy.dialects import anthropic_messages, openai_chat, openai_responses

FILE = Path(__file__).parents[2] / "docs" / "openapi.json"


def test_the_file_is_up_to_date() -> None:
    said = json.loads(FILE.read_text("utf-8"))
    assert said == json.loads(json.dumps(document())), "run: python -m areal.gateway.openapi > docs/openapi.json"


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("/v1/chat/completions", openai_chat.KNOWN),
        ("/v1/responses", openai_responses.KNOWN),
        ("/v1/messages", anthropic_messages.KNOWN),
    ],
)
def test_every_known_field_is_described(path: str, known: frozenset[str]) -> None:
    body = document()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(body["properties"]) == known


def test_every_route_and_method_is_described() -> None:
    described = document()["paths"]
    for path, route in ROUTES.items():
        found = described.get(path or "/", described.get(f"/v1{path}"))
        assert {method.upper() for method in found} == set(route.methods) - {"HEAD"}, path
