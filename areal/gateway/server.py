"""The gateway process: `python -m areal.gateway.server --config configs/taotoken_router.yaml --port 9000`.

Binds its port before anything else (a taken port is one sentence and exit 2), writes gateway.log from its first second,
prints `Gateway ready at http://…`. Alone it answers model calls with 503 until a training run attaches (attach.py); as
the child of a run (`--spec FILE`, docs/architecture.md) or beside another gateway (`--beside PORT`) it serves a run from the start. SIGTERM lets running streams
finish within a bound and exits 0. Keeps no state: another one on the same port serves the same sessions. No torch.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import uvloop

from areal.base.errors import ArealError, ConfigError
from areal.base.logs import LEVELS, announce, open_log, warn
from areal.cluster.child import ChildSpec, report_ready, run_child
from areal.gateway import state
from areal.gateway.app import GatewayApp
from areal.gateway.attachment import Attachment
from areal.gateway.control import Control
from areal.gateway.splice import Splice
from areal.gateway.state import GatewayFacts, RunFacts
from areal.web.address import bind, is_loopback, url_of
from areal.web.auth import DEFAULT_INTERNAL_TOKEN
from areal.web.serve import serve

if TYPE_CHECKING:
    from areal.config.run import RunConfig
    from areal.config.upstream import ApiGatewayConfig, ModelRoutingConfig
    from areal.gateway.channel import ChannelDoor

DEFAULT_PORT = 9000
DEFAULT_LOG_DIR = "logs/areal_async"
GRACE_S = 8.0  # below the 10 s after which a scheduler kills its children


@dataclass(frozen=True, slots=True)
class Settings:
    """What a gateway is started with. facts: the run it serves; None: a run attaches later. channel: the upstream channel and its
    routes. guest_token: opens the channel while there is no run. log: where its log lies."""

    body_limit: int
    facts: RunFacts | None = None
    channel: tuple[ApiGatewayConfig, ModelRoutingConfig | None] | None = None
    guest_token: str | None = None
    log: str = ""


async def serve_gateway(listener: socket.socket, settings: Settings, ready: Callable[[str], None]) -> None:
    """Serve on a bound socket until SIGTERM. ready(url) is called once it answers. Raises ConfigError, StoreError."""
    address, port = listener.getsockname()[:2]
    loopback, url, secret = is_loopback(address), url_of(listener), secrets.token_urlsafe(32)
    own = GatewayFacts(port=port, pid=os.getpid(), url=url, secret=secret, log=settings.log)
    state.write(state.gateway_file(port), own)
    try:
        async with AsyncExitStack() as stack:
            door = await _door(stack, settings, loopback=loopback)
            models = {} if door is None else door.models
            attachment = await stack.enter_async_context(
                Attachment(port=port, loopback=loopback, channel_models=models)
            )
            splice = await stack.enter_async_context(Splice())
            if settings.facts is not None:
                await attachment.attach(settings.facts)
                state.write(state.run_file(port), settings.facts)  # for gateways beside this one
            else:
                await _restore(attachment)
            control = Control(attachment, secret)
            limit = settings.body_limit
            app = GatewayApp(attachment, splice, control, loopback=loopback, body_limit=limit, door=door)
            await serve(app, listener, ready=ready, grace_s=GRACE_S)
    finally:
        state.remove(state.gateway_file(port), os.getpid())
        if settings.facts is not None:
            state.remove(state.run_file(port), settings.facts.pid)


async def _door(stack: AsyncExitStack, settings: Settings, *, loopback: bool) -> ChannelDoor | None:
    """To the upstream channel, where one is configured. Raises ConfigError."""
    if settings.channel is None:
        return None
    # Imported here: most gateways have none, and start sooner without its client.
    from areal.gateway.channel import ChannelDoor, ChannelMetrics
    from areal.inference.upstream.client import Channel

    metrics = ChannelMetrics()
    channel = await stack.enter_async_context(Channel(*settings.channel, observe=metrics.observe))
    guest_token = settings.guest_token or (DEFAULT_INTERNAL_TOKEN if loopback else None)
    if not loopback and guest_token == DEFAULT_INTERNAL_TOKEN:
        raise ConfigError(
            f"the internal token {DEFAULT_INTERNAL_TOKEN!r} works on loopback only, because everybody knows it; "
            "set rollout.agent.internal_token to a secret of your own, or bind the gateway to 127.0.0.1"
        )
    door = ChannelDoor(channel, metrics, guest_token=guest_token)
    announce(
        "Gateway", f"upstream models: {', '.join(f'{role} ({name})' for role, name in door.models.items()) or 'none'}"
    )
    return door


async def _restore(attachment: Attachment) -> None:
    """A run that was attached before a restart; if it cannot be served again, the gateway starts free."""
    try:
        await attachment.restore()
    except ArealError as error:
        warn("Gateway", f"the run that was attached to port {attachment.port} cannot be served again: {error}")


def _child(spec: ChildSpec) -> None:
    """As a process of a run: job = host, port, log_level, log_dir, max_body_bytes and the run's facts."""
    job = spec.job
    try:
        listener = bind(job["host"], job["port"], setting="rollout.agent.gateway_port")
        controller = spec.parent_pid or os.getpid()
        facts = RunFacts(
            run_id=job["run_id"],
            pid=controller,
            born=state.birth(controller),
            store_url=job["store_url"],
            signing_key_path=job["signing_key_path"],
            admin_api_key=job["admin_api_key"],
            model_names=tuple(job["model_names"]),
            internal_token=job.get("internal_token"),
            channel_token=job.get("channel_token"),
            channel_models=job.get("channel_models") or {},
        )
        settings = Settings(job["max_body_bytes"], facts, _channel_of(job))
    except KeyError as error:
        raise ConfigError(f"the spec of {spec.name} lacks {error.args[0]!r}; start the run anew") from None
    logs = [Path(job["log_dir"]) / "gateway.log"] if job.get("log_dir") else []
    with open_log(*logs, run_id=facts.run_id, terminal=not logs, level=job.get("log_level", "info")):

        def ready(url: str) -> None:
            announce("Gateway", f"Gateway ready at {url}")
            report_ready(spec, url=url)

        _run(listener, settings, ready)


def _channel_of(job: Mapping[str, Any]) -> tuple[ApiGatewayConfig, ModelRoutingConfig | None] | None:
    """The sections of a run's configuration, as they stand in its spec."""
    if not job.get("api_gateway"):
        return None
    from areal.config.upstream import ApiGatewayConfig, ModelRoutingConfig

    routing = job.get("model_routing")
    return (
        ApiGatewayConfig.model_validate(job["api_gateway"]),
        None if routing is None else ModelRoutingConfig.model_validate(routing),
    )


def _alone(arguments: argparse.Namespace) -> None:
    """From the command line, before or beside a run."""
    listener = bind(arguments.host or "127.0.0.1", arguments.port, setting="--port")
    run_id, level = f"gateway-{os.getpid()}", arguments.log_level
    with open_log(Path(arguments.log_dir) / "gateway.log", run_id=run_id, terminal=False, level=level):
        try:
            with open_log(run_id=run_id, level=level):
                _start_alone(arguments, listener)
        except ArealError as error:
            warn("Gateway", str(error))  # into the file; main says it on the terminal
            raise


def _start_alone(arguments: argparse.Namespace, listener: socket.socket) -> None:
    config = _config(arguments.config)
    agent = config.rollout.agent
    address, port = listener.getsockname()[:2]
    if agent.gateway_host and not arguments.host and agent.gateway_host != address:
        listener.close()
        listener = bind(agent.gateway_host, port, setting="--port")
    facts = None if arguments.beside is None else _served_on(arguments.beside)
    channel = None if config.api_gateway is None else (config.api_gateway, config.model_routing)
    log = str((Path(arguments.log_dir) / "gateway.log").absolute())
    settings = Settings(agent.max_body_bytes, facts, channel, agent.internal_token, log)
    _run(listener, settings, lambda url: announce("Gateway", f"Gateway ready at {url}"))


def _served_on(port: int) -> RunFacts:
    """The run that this user's gateway on another port serves. Raises ConfigError."""
    facts = state.read_run(port)
    if facts is None:
        raise ConfigError(
            f"--beside {port}: no gateway of this user serves a run on that port; give the port of one that does"
        )
    return msgspec.structs.replace(facts, channel_models={})  # the run itself asks the gateway that it started with


def _config(path: str | None) -> RunConfig:
    """Of the router file or run config; without one, the defaults. Raises ConfigError."""
    # Imported here: the child of a run needs no loader and starts sooner without it.
    from areal.config.run import RunConfig

    if path is None:
        return RunConfig()
    from areal.config.load import load_config
    from areal.config.supported import placeholders

    config = load_config(Path(path))
    if wrong := [line for line in placeholders(config) if line.startswith("api_gateway.")]:
        raise ConfigError("\n".join(wrong))
    return config


def _run(listener: socket.socket, settings: Settings, ready: Callable[[str], None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_gateway(listener, settings, ready))


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Exit codes: 0 stopped by SIGTERM or Ctrl-C, 1 an error, 2 a wrong configuration or a taken port."""
    words = sys.argv[1:] if argv is None else list(argv)
    if any(word == "--spec" or word.startswith("--spec=") for word in words):
        run_child(_child, words)
    parser = argparse.ArgumentParser(prog="areal gateway", description="One URL for all agents of a training run.")
    parser.add_argument("--config", metavar="FILE", help="router file (configs/taotoken_router.yaml) or run config")
    parser.add_argument("--host", help="address to bind; default: the config's gateway_host, else 127.0.0.1")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"default {DEFAULT_PORT}; 0 takes a free one")
    parser.add_argument(
        "--beside", type=int, metavar="PORT", help="serve the run of the gateway on this port too, until that run ends"
    )
    parser.add_argument("--log-level", choices=sorted(LEVELS, key=LEVELS.__getitem__), default="info")
    parser.add_argument("--log-dir", default=DEFAULT_LOG_DIR, help=f"folder of gateway.log; default {DEFAULT_LOG_DIR}")
    try:
        _alone(parser.parse_args(words))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except (ArealError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)


if __name__ == "__main__":
    main()
