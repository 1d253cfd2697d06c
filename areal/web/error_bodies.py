"""What an error looks like as JSON in each family of public protocols.

    openai_error_body(InvalidKey())                  # {"error": {"message", "type", "param", "code"}}
    anthropic_error_body(InvalidKey(), "req_1")      # {"type": "error", "error": {"type", "message"}, "request_id"}

Secrets in messages are redacted: they may quote what a client sent. Used by app.py, the proxy's dialects and the gateway, so
that a client cannot tell by an error's shape who said it.
"""

from __future__ import annotations

from typing import Any

from areal.base.errors import ArealError
from areal.base.redact import redact

# Anthropic's error types by status; clients choose by the type where they see no status (mid-stream).
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Codes that Anthropic's clients act on: here, by sending the whole conversation again.
_ANTHROPIC_CODES = {"previous_response_not_found": "thread_not_found"}


def openai_error_body(error: ArealError) -> dict[str, Any]:
    """Chat Completions, Responses, and areal's own routes."""
    return {"error": {"message": redact(str(error)), "type": error.type, "param": error.param, "code": error.code}}


def anthropic_error_body(error: ArealError, request_id: str = "") -> dict[str, Any]:
    """Messages. request_id: left out where it is unknown."""
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error")
    said: dict[str, Any] = {"type": kind, "message": redact(str(error))}
    if error.code in _ANTHROPIC_CODES:
        said["details"] = {"error_code": _ANTHROPIC_CODES[error.code]}
    return {"type": "error", "error": said, **({"request_id": request_id} if request_id else {})}
