"""Which run this gateway serves: none yet, the one it was started for, or one that attached to it.

    async with Attachment(port=9000, loopback=True) as attachment:
        await attachment.attach(facts)            # opens the run's store and signing key
        run = attachment.run()                    # raises Unavailable (503) while there is none

The run's facts lie in a file (state.py), so a gateway that restarts serves the same run again. A run whose controller
process has ended is let go by itself, and the gateway is free for the next one. Errors: Conflict (another run lives),
ConfigError. Used by app.py and control.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

from areal.base.errors import ConfigError, Conflict, Unavailable
from areal.base.logs import announce, warn
from areal.base.redact import protect
from areal.gateway import state
from areal.gateway.routing import READING_AGE_S, Directory, Run
from areal.gateway.state import RunFacts
from areal.store import open_store
from areal.web.auth import DEFAULT_ADMIN_KEY, DEFAULT_INTERNAL_TOKEN, SessionKeys, load_or_create_signing_key

_LOOK_EVERY_S = 1.0  # how often the controller's process is looked at


class Attachment:
    """At most one run. Every method belongs to one event loop."""

    def __init__(
        self,
        *,
        port: int,
        loopback: bool,
        reading_age_s: float = READING_AGE_S,
        channel_models: Mapping[str, str] | None = None,
    ) -> None:
        """channel_models: what this gateway serves from the upstream channel, role -> model_id."""
        self.port = port
        self._channel_models = channel_models or {}
        self._loopback, self._reading_age_s = loopback, reading_age_s
        self._facts: RunFacts | None = None
        self._run: Run | None = None
        self._open = AsyncExitStack()
        self._changing = asyncio.Lock()
        self._alive, self._looked_at = False, float("-inf")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._open.aclose()
        self._run = None

    @property
    def run_id(self) -> str | None:
        """The run that is served now, None if there is none."""
        return self._run.id if self._run is not None and self._facts is not None and self._lives(self._facts) else None

    def run(self) -> Run:
        """The run. Raises Unavailable while none is attached, or when it has ended."""
        if self._run is None:
            raise Unavailable("no training run is attached yet; start one (python -m areal.train --config …) and retry")
        if self.run_id is None:
            raise Unavailable("the training run of this gateway has ended; start it again (it resumes) and retry")
        return self._run

    def run_if_any(self) -> Run | None:
        """The run, or None where `run` would raise."""
        return self._run if self.run_id is not None else None

    async def attach(self, facts: RunFacts) -> None:
        """Serve this run. The same run again is a refresh of its facts. Raises Conflict, ConfigError, StoreError."""
        async with self._changing:
            current = self._facts
            if current is not None and current.run_id != facts.run_id and self._lives(current):
                raise Conflict(
                    f"this gateway serves run {current.run_id} (process {current.pid}); stop it, give this run a "
                    "port of its own (rollout.agent.gateway_port; 0 takes a free one), or start another gateway with another --port"
                )
            self._check_channel(facts)
            if not self._loopback and facts.admin_api_key == DEFAULT_ADMIN_KEY:
                raise ConfigError(
                    f"the default admin key {DEFAULT_ADMIN_KEY!r} works on loopback only; "
                    "set rollout.agent.admin_api_key, or bind the gateway to 127.0.0.1"
                )
            if not self._loopback and facts.internal_token == DEFAULT_INTERNAL_TOKEN:
                raise ConfigError(
                    f"the internal token {DEFAULT_INTERNAL_TOKEN!r} works on loopback only, because everybody knows it; "
                    "set rollout.agent.internal_token to a secret of your own, or bind the gateway to 127.0.0.1"
                )
            protect(facts.admin_api_key, facts.internal_token, facts.channel_token)
            async with AsyncExitStack() as opening:
                store = await opening.enter_async_context(await open_store(facts.store_url))
                keys = SessionKeys(load_or_create_signing_key(Path(facts.signing_key_path)))
                directory = Directory(store.registry, reading_age_s=self._reading_age_s)
                before, self._open = self._open, opening.pop_all()
            self._run = Run(
                facts.run_id,
                directory,
                keys,
                facts.admin_api_key,
                facts.model_names,
                facts.internal_token,
                facts.channel_token,
                sessions=store.sessions,
                training=store.training,
            )
            self._facts, self._looked_at = facts, float("-inf")
            await before.aclose()
            if facts.admin_api_key == DEFAULT_ADMIN_KEY:
                warn(
                    "Gateway",
                    "the admin key is the default one, which everybody knows; set rollout.agent.admin_api_key",
                )
            announce("Gateway", f"serves run {facts.run_id} (process {facts.pid})")

    async def detach(self, run_id: str | None = None) -> None:
        """Let the run go; with an id only if it is this one."""
        async with self._changing:
            if self._run is None or (run_id is not None and self._run.id != run_id):
                return
            announce("Gateway", f"let go of run {self._run.id}")
            self._run = self._facts = None
            before, self._open = self._open, AsyncExitStack()
            await before.aclose()

    async def restore(self) -> None:
        """Serve the run that was attached to this port before the gateway restarted, if it still lives."""
        facts = state.read_run(self.port)
        if facts is not None:
            await self.attach(facts)

    def _check_channel(self, facts: RunFacts) -> None:
        """Whether this gateway's channel is the one that the run wants. Raises ConfigError."""
        if "policy_model" in self._channel_models:
            raise ConfigError(
                "this gateway answers for the policy by the channel (model_routing.policy_model.upstream), so nothing of a run behind it "
                "would be recorded; set upstream to false in its --config and start it again"
            )
        for role, model_id in facts.channel_models.items():
            served = self._channel_models.get(role)
            if served != model_id:
                raise ConfigError(
                    f"the run asks for {role} (model_id {model_id}), and this gateway serves {f'{served} as it' if served else 'no such model'}; "
                    "start it with --config and the router file of the run (agent.gateway_config)"
                )

    def _lives(self, facts: RunFacts) -> bool:
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_EVERY_S:
            self._alive = state.alive(facts.pid, facts.born)
            self._looked_at = now
        return self._alive
