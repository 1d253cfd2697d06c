"""OpenClaw as it is installed: `openclaw agent exec PROMPT` in the task's folder, configured once, in a file, with the session's key.

The file lies in a home of its own for each try. Of its three protocols the Responses one leaves a conversation's beginning as it was,
so its turns go on from their own tokens (docs/clients.md). It has no limit of turns, so the proxy holds it to max_turns. Used by
frameworks/__init__.py.
"""

from __future__ import annotations

import json

from areal.rollout.programs import Try


class OpenClaw:
    """A Driver."""

    counts_turns = False

    command = (
        *("openclaw", "agent", "exec", "{prompt}", "--config", "{home}/openclaw.json", "--cwd", "{folder}"),
        *("--local-model-lean", "--json"),
    )

    def prepare(self, one: Try) -> dict[str, str]:
        """Also for a command line of the user's, which finds the file by {home}/openclaw.json or $OPENCLAW_CONFIG_PATH."""
        path = one.home / "openclaw.json"
        path.write_text(json.dumps(configuration(one)), encoding="utf-8")
        return {"TERM": "dumb", "OPENCLAW_CONFIG_PATH": str(path)}


def configuration(one: Try) -> dict[str, object]:
    """One provider with one model, and nothing else of the world."""
    model = {
        "id": one.settings.model,
        "name": one.settings.model,
        "reasoning": False,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "contextWindow": one.settings.context_tokens,
        "maxTokens": one.settings.output_tokens,
    }
    provider = {"baseUrl": one.base_url, "apiKey": one.api_key, "api": "openai-responses", "models": [model]}
    return {
        "models": {"mode": "replace", "providers": {"areal": provider}},
        "agents": {"defaults": {"model": {"primary": f"areal/{one.settings.model}"}}},
    }
