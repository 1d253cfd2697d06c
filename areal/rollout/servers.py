"""Which inference servers get traffic: the controller says so, every worker's router obeys before it answers.

    await tell_workers(workers, urls)                                 # in the controller
    InService(router, urls_of_its_backends, run_token).add_to(app)    # in the worker: POST /servers {"serving": [url, …]}

A worker that was told keeps no request on a server that is out; what streams there already goes on under that server's old label.
With none in service a model call is 503 with Retry-After. Used by weights.py and worker.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from areal.base.errors import BadRequest
from areal.inference.router import Router
from areal.web.app import add_route, send_json
from areal.web.auth import presented_keys, require
from areal.web.body import read_body
from areal.web.client import JsonClient

PATH = "/servers"


class _Serving(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    serving: list[str]


async def tell_workers(workers: Sequence[JsonClient], serving: Sequence[str]) -> None:
    """Returns when every worker uses these servers alone. Raises BackendError if one cannot be told."""
    await asyncio.gather(*(worker.post(PATH, {"serving": list(serving)}) for worker in workers))


class InService:
    """The worker's side. urls: of the router's backends, in their order."""

    def __init__(self, router: Router, urls: Sequence[str], run_token: str) -> None:
        self._router = router
        self._urls = list(urls)
        self._token = run_token

    def add_to(self, app: FastAPI) -> None:
        add_route(app, PATH, self._handle)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        require(presented_keys(scope["headers"]), self._token, "the run's token")
        try:
            told = msgspec.json.decode(await read_body(receive), type=_Serving)
        except msgspec.MsgspecError as error:
            raise BadRequest(f'not a list of servers: {error}; send {{"serving": ["http://…"]}}') from None
        unknown = sorted(set(told.serving) - set(self._urls))
        if unknown:
            raise BadRequest(f"this worker has no inference server {unknown[0]}; it has {', '.join(self._urls)}")
        self._router.serve_from([index for index, url in enumerate(self._urls) if url in told.serving])
        await send_json(send, {"serving": told.serving})
