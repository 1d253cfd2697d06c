"""What can go wrong, one type per remedy. Every message says what happened, with which value, and what to do.

    raise NoCapacity(running=12, limit=12, retry_after_s=2.0)

ArealError
  ConfigError          the configuration cannot run as written            exit 2
  BadRequest       400  the client's request is at fault
    ContextOverflow      the prompt does not fit the model's context
  InvalidKey       401  missing, wrong, ended or expired key
  Forbidden        403  this key may not do that
  NotFound         404  unknown interaction, response or session
  MethodNotAllowed 405
  Conflict         409  the key is being refreshed right now
  BodyTooLarge     413
  NoCapacity       429  staleness control: training has to catch up first
    AdmissionHeld        what rewards sessions is away, so none may start
  InternalError    500  a bug; the log has its cause
  BackendError     502  worker or backend unreachable, or it answered nonsense
    BackendTimeout   504
    WeightsRefused   409  a server kept its old weights; names the arrow
    UpstreamError    ...  the channel for reward and judge models failed a call; its own status, else 502 or 504
  UpstreamLimit    429  a limit of a route to the channel; 503 while its model is taken for dead
    UpstreamBudget       its tokens are spent for good
  Unavailable      503  draining, or the store cannot write
  StoreError       503  the store refused (wrong schema, damaged)
    StoreUnready         it cannot write now, but may soon (disk full, locked)
      StoreAway            its server is away, to read from too
  ProcessDied           a child process ended; carries its last log lines
  CallFailed            the user's code, run in a process of its own, gave no result
  ShapeError            arrays do not fit together
  TrainingError         a step cannot be applied (NaN, no trainable token)
  CheckpointError       a checkpoint cannot be written, or is not whole
  AccountingError       what was recorded and what became of it do not add up

The HTTP edge maps `status`, `code`, `retry_after_s` and `should_retry` to each protocol's error shape (web/app.py and
proxy/dialects). A failed session is data, never a crash.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal


class ArealError(Exception):
    """Root of all errors of areal. `status` is the HTTP status it becomes at the edge."""

    status = 500
    type = "server_error"  # OpenAI's error.type
    code: str | None = None  # OpenAI's error.code
    should_retry: bool | None = None  # becomes x-should-retry when set
    retry_after_s: int | None = None  # becomes Retry-After (1..30)
    param: str | None = None


class ConfigError(ArealError):
    """The configuration cannot run as written; the command ends with exit code 2 before anything starts."""


class BadRequest(ArealError):
    """The request is at fault. `param` names the field."""

    status = 400
    type = "invalid_request_error"
    should_retry = False

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class MethodNotAllowed(ArealError):
    """The route is known, the method is not."""

    status = 405
    type = "invalid_request_error"
    should_retry = False


class ContextOverflow(BadRequest):
    """The prompt alone fills the model's context."""

    def __init__(self, tokens: int, maximum: int) -> None:
        self.tokens, self.maximum = tokens, maximum
        super().__init__(
            f"prompt is too long: {tokens} tokens > {maximum} maximum; shorten the messages or serve a longer context",
            param="messages",
            code="context_length_exceeded",
        )


class InvalidKey(ArealError):
    """Missing, wrong, ended or expired key."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"
    should_retry = False

    def __init__(self, reason: str = "") -> None:
        detail = reason or "check the key; session keys come from POST /rl/start_session"
        super().__init__(f"Invalid API key: {detail}")


class Forbidden(ArealError):
    """The key is good, but it may not do that."""

    status = 403
    type = "permission_error"
    should_retry = False


class NotFound(ArealError):
    """No such interaction, response or session for this key."""

    status = 404
    type = "not_found_error"
    should_retry = False


class Conflict(ArealError):
    """Something else is happening to this key right now. SDKs would retry a bare 409, so should_retry is False."""

    status = 409
    type = "conflict_error"
    should_retry = False


class BodyTooLarge(ArealError):
    """The request body is larger than the configured limit."""

    status = 413
    type = "invalid_request_error"
    should_retry = False


class NoCapacity(ArealError):
    """All rollout slots are taken: new sessions wait until training catches up."""

    status = 429
    type = "rate_limit_error"
    code = "no_capacity"
    should_retry = True

    def __init__(self, running: int, limit: int, retry_after_s: float = 2.0) -> None:
        self.retry_after_s = max(1, min(30, round(retry_after_s)))
        super().__init__(
            f"no free slot: {running} of {limit} groups run or wait to be trained; retry in {self.retry_after_s} s, "
            "end a session, or raise rollout.max_head_offpolicyness or rollout.max_concurrent_rollouts"
        )


class AdmissionHeld(NoCapacity):
    """No session may start until the run lets them again. reason: a clause that says why, and what to do."""

    code = "admission_held"

    def __init__(self, reason: str, retry_after_s: float = 10.0) -> None:
        super().__init__(0, 0, retry_after_s)
        self.args = (f"no session starts now: {reason}; retry in {self.retry_after_s} s",)


class InternalError(ArealError):
    """Something unforeseen, a bug; the log has the cause under the request's id."""

    code = "internal_error"
    should_retry = False


class BackendError(ArealError):
    """A worker or an inference backend is unreachable or answered something that is not an answer."""

    status = 502
    type = "server_error"
    code = "backend_error"
    should_retry = True


class BackendTimeout(BackendError):
    """A worker or a backend did not answer in time."""

    status = 504
    code = "backend_timeout"


WeightsArrow = Literal["load", "verify", "pause", "label"]


class WeightsRefused(BackendError):
    """A server did not take new weights: its old ones and their label stay. arrow: what failed, see inference/swap.py."""

    status = 409
    should_retry = False

    def __init__(self, arrow: WeightsArrow, reason: str) -> None:
        super().__init__(reason)
        self.arrow: WeightsArrow = arrow
        self.code = f"weights_{arrow}"


class UpstreamError(BackendError):
    """The channel for reward and judge models failed a call: `status` is its own where it named one, else 502, or 504 for a time-out.

    Clients are told not to retry, because the gateway has. again: whether another attempt may help. wait_s: what it said in Retry-After."""

    code = "upstream_error"
    should_retry = False
    _TYPES: ClassVar[dict[int, str]] = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        429: "rate_limit_error",
    }

    def __init__(self, message: str, *, status: int = 502, again: bool = False, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.status, self.again, self.wait_s = status, again, wait_s
        self.type = self._TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.retry_after_s = None if wait_s is None else max(1, min(30, round(wait_s)))


class UpstreamLimit(ArealError):
    """A limit of a route to the channel refused a call before it was sent; nothing was spent."""

    status = 429
    type = "rate_limit_error"
    code = "upstream_limit"

    def __init__(
        self, message: str, *, status: int = 429, retry_after_s: float = 1.0, should_retry: bool = True
    ) -> None:
        super().__init__(message)
        self.status, self.should_retry = status, should_retry
        self.retry_after_s = max(1, min(30, math.ceil(retry_after_s)))


class UpstreamBudget(UpstreamLimit):
    """The tokens that a route may use are spent; only another configuration opens it again."""

    code = "upstream_budget"


class Unavailable(ArealError):
    """The service is draining or cannot take work now."""

    status = 503
    type = "server_error"
    code = "unavailable"
    should_retry = True
    retry_after_s = 5


class StoreError(Unavailable):
    """The store refused: written by another schema, damaged, closed, or StoreUnready. Nothing was half written."""

    code = "store_error"


class StoreUnready(StoreError):
    """The store cannot write now, but may soon without anybody touching it again: a full disk, a lock held for too long, a server
    that is away."""


class StoreAway(StoreUnready):
    """The server of the store cannot be reached, or hung up. uncertain: it did so in the middle of a commit, so what was to be written
    may have been."""

    def __init__(self, message: str, *, uncertain: bool = False) -> None:
        super().__init__(message)
        self.uncertain = uncertain


class ProcessDied(ArealError):
    """A process of the run ended on its own. The message carries its last log lines."""


class CallFailed(ArealError):
    """A call of the user's code in a process of its own gave no result. why: it raised, took too long, or its process ended."""

    def __init__(self, why: Literal["raised", "timed_out", "died"], message: str) -> None:
        super().__init__(message)
        self.why = why


class ShapeError(ArealError):
    """Arrays do not fit together; a bug in the caller, named with both shapes."""


class TrainingError(ArealError):
    """A training step cannot be applied; the message names the sample and the remedy."""


class CheckpointError(ArealError):
    """A checkpoint could not be written (a full disk), or is not what was written; the message names the folder."""


class AccountingError(ArealError):
    """recorded = trained + masked + dropped + waiting + open does not hold somewhere; the session or group at fault is named."""
