"""Control routes: how a training run and a gateway prove themselves to each other before one serves the other.

    POST /control/challenge {"nonce": theirs}                      -> {"nonce": ours, "proof": HMAC(secret, …)}
    POST /control/attach    {"nonce": ours, "proof": HMAC(secret, …)}  -> {"attached": run id}
    POST /control/detach    {"nonce": ours, "proof": HMAC(secret, …)}  -> {"detached": run id}

The secret lies in a file of mode 0600 (state.py) and never travels; a proof is bound to the port, to the call and to a
nonce that works once. The run's facts are read from their file, so nothing worth stealing passes the port. Only
loopback callers are heard. Used by app.py; attach.py is the other side.
"""

from __future__ import annotations

import hmac
import secrets
import time
from typing import Any, Literal

import msgspec

from areal.base.errors import ArealError, BadRequest, InvalidKey, NotFound
from areal.gateway import state
from areal.gateway.attachment import Attachment

Call = Literal["challenge", "attach", "detach"]
NONCE_LIFE_S = 30.0
_MOST_NONCES = 256  # a flood of challenges must not grow the table


def proof_of(secret: str, call: str, port: int, *nonces: str) -> str:
    """What knowledge of the secret looks like: hex HMAC-SHA256 over the call, the port and the nonces."""
    return hmac.new(secret.encode(), "|".join(("areal", call, str(port), *nonces)).encode(), "sha256").hexdigest()


class _Challenge(msgspec.Struct):
    nonce: str


class _Proof(msgspec.Struct):
    nonce: str
    proof: str
    run_id: str | None = None


class Control:
    """Answers the control calls of one gateway."""

    def __init__(self, attachment: Attachment, secret: str) -> None:
        self._attachment, self._secret = attachment, secret
        self._nonces: dict[str, float] = {}

    async def answer(self, call: str, body: bytes) -> dict[str, Any]:
        """The answer's JSON. Raises NotFound, BadRequest, InvalidKey, and what attaching raises."""
        try:
            if call == "challenge":
                return self._challenge(msgspec.json.decode(body, type=_Challenge).nonce)
            request = msgspec.json.decode(body, type=_Proof)
        except (msgspec.MsgspecError, RecursionError) as error:  # the latter: nested deeper than the decoder goes
            raise BadRequest(f"not a control call: {error}; both sides must be of one release of areal") from None
        self._verify(call, request)
        if call == "attach":
            return await self._attach()
        if call == "detach":
            await self._attachment.detach(request.run_id)
            return {"detached": request.run_id}
        raise NotFound(f"there is no control call {call}")

    def _challenge(self, theirs: str) -> dict[str, Any]:
        now = time.monotonic()
        self._nonces = {nonce: until for nonce, until in self._nonces.items() if until > now}
        while len(self._nonces) >= _MOST_NONCES:
            self._nonces.pop(next(iter(self._nonces)))
        ours = secrets.token_urlsafe(24)
        self._nonces[ours] = now + NONCE_LIFE_S
        proof = proof_of(self._secret, "challenge", self._attachment.port, theirs, ours)
        return {"nonce": ours, "proof": proof, "run_id": self._attachment.run_id}

    def _verify(self, call: str, request: _Proof) -> None:
        until = self._nonces.pop(request.nonce, 0.0)
        wanted = proof_of(self._secret, call, self._attachment.port, request.nonce)
        if not hmac.compare_digest(request.proof.encode(), wanted.encode()) or until < time.monotonic():
            raise InvalidKey(
                "this control call does not prove that it comes from this user; see areal/gateway/attach.py"
            )

    async def _attach(self) -> dict[str, Any]:
        facts = state.read_run(self._attachment.port)
        if facts is None:
            raise NotFound(
                f"no run has written {state.run_file(self._attachment.port)}; attach through areal.gateway.attach"
            )
        try:
            await self._attachment.attach(facts)
        except ArealError as error:
            return {"attached": None, "reason": str(error)}
        return {"attached": facts.run_id}
