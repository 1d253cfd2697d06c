"""The page's server: loopback only, one token, no foreign asset, nothing but GET.

    python -m areal.dashboard --run DIR [--port 0] [--log-dir DIR] [--tokenizer DIR]

The token stands in the URL that is printed; the page keeps it and sends it as `Authorization: Bearer`. The Host header must name
this machine, so that no page of another site can reach the data by a name that resolves to 127.0.0.1. Texts of sessions are
data: the page puts them in as text, and its Content-Security-Policy lets no script run but its own.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Literal

import orjson
from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response

from areal.base.errors import ArealError, NotFound
from areal.cluster.run_folder import RunFolder
from areal.dashboard.run_facts import RunFacts
from areal.dashboard.view import View
from areal.store import open_store
from areal.store.base import Store
from areal.store.location import find_store
from areal.web.address import bind, url_of
from areal.web.app import create_app
from areal.web.auth import presented_keys, require
from areal.web.serve import serve

PAGE = Path(__file__).with_name("page")
ASSETS = {
    "app.js": "text/javascript",
    "charts.js": "text/javascript",
    "tokens.js": "text/javascript",
    "style.css": "text/css",
}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
_STATES = {"all": None, "running": True, "ended": False}


def app(store: Store, log_dir: Path, token: str, facts: RunFacts | None = None) -> FastAPI:
    """The application. store: open, the caller's to close. log_dir: where metrics.jsonl is or will be."""
    view = View(store, log_dir, facts or RunFacts())

    def with_token(request: Request, token_in_url: Annotated[str, Query(alias="token")] = "") -> None:
        presented = (*presented_keys(request.headers.raw), *([token_in_url] if token_in_url else []))
        require(presented, token, "token of the URL that `python -m areal.dashboard` printed (?token=…)")

    routes = APIRouter()
    secret = [Depends(with_token)]

    @routes.get("/", dependencies=secret)
    async def page() -> Response:
        return _file("index.html", "text/html")

    @routes.get("/page/{name}")
    async def asset(name: str) -> Response:
        if name not in ASSETS:
            raise NotFound(f"the page has no file {name!r:.100}; its files are {', '.join(ASSETS)}")
        return _file(name, ASSETS[name])

    @routes.get("/api/overview", dependencies=secret)
    async def overview() -> Response:
        return _json(await view.overview())

    @routes.get("/api/sessions", dependencies=secret)
    async def sessions(
        limit: Annotated[int, Query(ge=1, le=1000)] = 100, state: Literal["all", "running", "ended"] = "all"
    ) -> Response:
        return _json(await view.sessions(limit, _STATES[state]))

    @routes.get("/api/session", dependencies=secret)
    async def session(id: str) -> Response:
        return _json(await view.session(id))

    application = create_app("dashboard", max_body_bytes=1024)
    application.include_router(routes)
    return application


async def show(run: Path, log_dir: Path, port: int, facts: RunFacts) -> None:
    """Serve the page of a run until SIGTERM or Ctrl-C. The run may be over, or not have begun a step."""
    url = find_store(run)  # opening would make one
    sock = bind("127.0.0.1", port, setting="--port")
    token = secrets.token_urlsafe(24)
    async with AsyncExitStack() as stack:
        stack.callback(sock.close)
        store = await stack.enter_async_context(await open_store(url))
        await serve(
            app(store, log_dir, token, facts),
            sock,
            ready=lambda _: print(f"dashboard: {url_of(sock)}/?token={token}", flush=True),
            grace_s=1.0,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="areal dashboard", description="One local page that shows a run while it runs."
    )
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="the run folder; it holds store.sqlite")
    parser.add_argument(
        "--log-dir", type=Path, metavar="DIR", help="where metrics.jsonl lies (default: where its config.yaml says)"
    )
    parser.add_argument("--port", type=int, default=0, help="0, the default, takes a free one")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="model folder whose tokenizer spells the tokens")
    options = parser.parse_args(arguments)
    try:
        run = options.run.absolute()
        facts = RunFacts.of(run, options.tokenizer)
        asyncio.run(show(run, options.log_dir or RunFolder.existing(run).logs, options.port, facts))
    except ArealError as error:
        print(f"dashboard: {error}", file=sys.stderr)
        return 2
    return 0


def _json(body: object) -> Response:
    return Response(orjson.dumps(body), media_type="application/json", headers=_HEADERS)


def _file(name: str, kind: str) -> Response:
    return Response((PAGE / name).read_bytes(), media_type=f"{kind}; charset=utf-8", headers=_HEADERS)
