"""Which inference servers get traffic: the controller says so, every worker's router obeys before it answers.

    await tell_workers(workers, urls, serial=1)                       # in the controller
    InService(router, urls_of_its_backends, run_token).add_to(app)    # in the worker: POST /servers {"serving": [url, …], "serial": 1}

A worker that was told keeps no request on a server that is out; what streams there already goes on under that server's old label.
Of two sets it keeps the one of the higher serial, in whichever order they come. With none in service a model call is 503 with Retry-After. Used by weights.py and worker.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from starlette.types import Receive, Scope, Send

from areal.base.errors import BadRequest
from areal.inference.router import Router
from areal.web.app import Application, add_route, send_json
from areal.web.auth import presented_keys, require
from areal.web.body import read_body
from areal.web.client import JsonClient

PATH = "/servers"
TELL_S = 30.0


class _Serving(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    serving: list[str]
    serial: int


async def tell_workers(workers: Sequence[JsonClient], serving: Sequence[str], *, serial: int) -> None:
    """Returns when every worker uses these servers alone, or those of a higher serial. Raises BackendError if one cannot be told."""
    body = {"serving": list(serving), "serial": serial}
    await asyncio.gather(*(worker.post(PATH, body, timeout_s=TELL_S) for worker in workers))


def supersedes(serial: int, known: int) -> bool:
    """Whether a worker that has heard of `known` takes the set of `serial`."""
    return serial > known


class InService:
    """The worker's side. urls: of the router's backends, in their order."""

    def __init__(self, router: Router, urls: Sequence[str], run_token: str) -> None:
        self._router = router
        self._urls = list(urls)
        self._token = run_token
        self._serial = 0

    def add_to(self, app: Application) -> None:
        add_route(app, PATH, self._handle)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        require(presented_keys(scope["headers"]), self._token, "the run's token")
        try:
            told = msgspec.json.decode(await read_body(receive), type=_Serving)
        except msgspec.MsgspecError as error:
            raise BadRequest(f'not a list of servers: {error}; send {{"serving": ["http://…"], "serial": 1}}') from None
        unknown = sorted(set(told.serving) - set(self._urls))
        if unknown:
            raise BadRequest(f"this worker has no inference server {unknown[0]}; it has {', '.join(self._urls)}")
        if supersedes(told.serial, self._serial):
            self._serial = told.serial
            self._router.serve_from([index for index, url in enumerate(self._urls) if url in told.serving])
        await send_json(send, {"serving": told.serving})
