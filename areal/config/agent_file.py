"""The agent file of `--agent-config`: a Python file that defines AGENT_CONFIG, as the agent itself imports it.

    AGENT_CONFIG = {"model_base_url": "http://localhost:9000/gateway/v1", "model_name": "default",
                    "api_key": "gateway-internal-token", "max_turns": 10}

Its api_key becomes the gateway's internal token, its URL says on which port the agent will knock. The file is the
user's own code and is executed. Used by load.py.
"""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from areal.base.errors import ConfigError
from areal.base.hosts import names_loopback
from areal.config.settings import AGENT_FILE, Setting, Settings

_KNOWN = ("model_base_url", "model_name", "api_key", "max_turns")
_NOT_YET = ("command", "tasks")
_PRINTED_PORT = 8080  # the second text prints this port, and the gateway's real one in a comment beside it
_GATEWAY_PORT = 9000


def read_agent_file(path: Path) -> tuple[Settings, list[str]]:
    """Settings under canonical names, and notes for the user. Raises ConfigError."""
    agent = _agent_config(path)
    settings: Settings = {}
    notes: list[str] = []

    def put(key: str, value: Any, name: str) -> None:
        settings[key] = Setting(value, AGENT_FILE, f"{path}: {name}")

    put("rollout.agent.mode", "online", "AGENT_CONFIG")
    if "api_key" in agent:
        put("rollout.agent.internal_token", agent["api_key"], "api_key")
    if "max_turns" in agent:
        put("rollout.agent.max_turns", agent["max_turns"], "max_turns")
    if "model_base_url" in agent:
        port, note = _port(str(agent["model_base_url"]), path)
        put("rollout.agent.gateway_port", port, "model_base_url")
        notes += note
    return settings, notes


def _agent_config(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise ConfigError(f"{path} does not exist (looked in {Path.cwd()}); --agent-config names a Python file")
    try:
        agent = runpy.run_path(str(path)).get("AGENT_CONFIG")
    except SyntaxError as error:
        raise ConfigError(f"{path}, line {error.lineno}: {error.msg}; this is not valid Python") from None
    except ImportError as error:
        raise ConfigError(f"{path} imports what is not installed here: {error}") from None
    if not isinstance(agent, Mapping):
        raise ConfigError(f"{path} defines no AGENT_CONFIG = {{...}}; known entries are {', '.join(_KNOWN)}")
    unbuilt = [name for name in _NOT_YET if agent.get(name) is not None]
    if unbuilt:
        raise ConfigError(
            f"{path}: {' and '.join(unbuilt)} (the trainer starting this agent by itself) is not part of this version; "
            "take it out and start the agent yourself, or set rollout.agent.path to run one inside"
        )
    unknown = sorted(set(agent) - {*_KNOWN, *_NOT_YET})
    if unknown:
        raise ConfigError(
            f"{path}: AGENT_CONFIG has unknown entries {', '.join(unknown)}; known are {', '.join(_KNOWN)}"
        )
    return agent


def _port(url: str, path: Path) -> tuple[int, list[str]]:
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        parts, port = urlsplit(""), 0
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"{path}: model_base_url {url!r} is no URL; write http://localhost:{_GATEWAY_PORT}/gateway/v1"
        )
    if not names_loopback(parts.hostname):
        raise ConfigError(
            f"{path}: model_base_url names host {parts.hostname}; a run serves its gateway on its own host: start the run "
            "there, or write localhost"
        )
    if port == _PRINTED_PORT:
        return _GATEWAY_PORT, [
            f"model_base_url {url} is not the gateway's address: agents use "
            f"http://{parts.hostname}:{_GATEWAY_PORT}/gateway/v1, and the run goes on with that"
        ]
    return port, []
