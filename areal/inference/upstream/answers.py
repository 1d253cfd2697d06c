"""What the channel said: an answer, or why it is none. A status is looked at first, then the body, whatever type it says it has (T106).

    answer = read_answer(route, 200, headers, body)      # the Chat Completions object, or UpstreamError (T099)
    chunk = read_chunk(route, event.data)                # of a stream
    as_chunks(answer)                                    # where a stream was asked for and a whole answer came

A 200 whose body is an error is that error, with the status that its code names. An answer without choices, with null ones, or one whose
finish_reason is `error` is no answer: 502, never an empty text that somebody would score. What may help when sent again
(429, 5xx) is marked. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import orjson

from areal.base.errors import UpstreamError
from areal.base.redact import hint, redact
from areal.inference.upstream.routes import Route
from areal.web.client import decode_body, reason_of, retry_after

Json = dict[str, Any]


class _Function(msgspec.Struct):
    name: str | None = None


class _Call(msgspec.Struct):
    id: str | None = None
    index: int | str | None = None
    function: _Function | None = None


class _Said(msgspec.Struct):
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    """What every reader of a choice relies on, whether it is passed on or translated."""

    finish_reason: str | None = None
    message: _Said | None = None
    delta: _Said | None = None


def read_answer(route: Route, status: int, headers: Mapping[str, str], body: bytes) -> Json:
    """A whole answer. Raises UpstreamError."""
    said = decode_body(body)
    if not 200 <= status < 300:
        reason = f"to {_place(headers.get('Location', ''))}" if 300 <= status < 400 else _reason(said)
        raise failure(route, status, reason, wait_s=retry_after(headers))
    if not isinstance(said, dict):
        raise _no_answer(route, f"no JSON object but {_reason(said)!r}")
    _raise_error_in(route, said, headers)
    choices = said.get("choices")
    if not isinstance(choices, list) or not choices:
        raise without_choices(route, said)
    for choice in choices:
        if not isinstance(choice, dict) or not isinstance(choice.get("message"), dict):
            raise _no_answer(route, f"a choice without a message: {_snippet(said)}")
        _raise_bad_choice(route, choice)
    return said


def read_chunk(route: Route, data: bytes, *, name: str = "message") -> Json:
    """One event of a stream and its name; its choices are a list, perhaps an empty one. Raises UpstreamError."""
    said = decode_body(data)
    if not isinstance(said, dict):
        raise _no_answer(route, f"an event that is no JSON object: {_reason(said)!r}")
    _raise_error_in(route, {"error": said} if name == "error" and not said.get("error") else said, {})
    choices = said.get("choices") or []
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise _no_answer(route, f"an event whose choices are no list: {_snippet(said)}")
    for choice in choices:
        _raise_bad_choice(route, choice)
    return {**said, "choices": choices}


def without_choices(route: Route, last: Json) -> UpstreamError:
    """Of a stream that ended, none of whose events had a choice."""
    return _no_answer(route, f"no choices: {_snippet(last)}")


def as_chunks(answer: Json) -> list[Json]:
    """The events that this answer would have been streamed as."""
    head = {name: answer.get(name) for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    choices = []
    for place, choice in enumerate(answer["choices"]):
        delta = dict(choice["message"])
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{**call, "index": index} for index, call in enumerate(calls)]
        choices.append({"index": place, "delta": delta, "finish_reason": choice.get("finish_reason") or "stop"})
    return [
        {**head, "choices": choices},
        *([{**head, "choices": [], "usage": answer["usage"]}] if answer.get("usage") else []),
    ]


def usage_of(said: Json) -> tuple[int, int]:
    """Prompt and output tokens, as far as the channel says them."""
    usage = said.get("usage")
    found = [usage.get(name) if isinstance(usage, dict) else 0 for name in ("prompt_tokens", "completion_tokens")]
    prompt, output = (count if type(count) is int else 0 for count in found)  # true is no number
    return prompt, output


def failure(route: Route, status: int, reason: str, *, wait_s: float | None = None) -> UpstreamError:
    """What a status other than 2xx means, and what to do about it."""
    role, said = route.role, f"{status}: {reason}"
    if status == 401:
        text = f"Invalid API key: the channel refuses the key in api_gateway.api_key ({said}); check the variable that it is read from"
    elif status == 402:
        text = f"the account at the channel has nothing left for {role} ({said}); top it up at the channel's provider"
    elif status == 407:
        text = f"the proxy of the environment asks for other credentials ({said}); correct its variable, or put the channel's host into NO_PROXY"
    elif status == 403:
        text = f"the channel forbids this call for {role} ({said}); check what the key in api_gateway.api_key may do"
    elif status == 404:
        text = f"the channel does not find {role} ({said}); check model_routing.{role}.model_id={route.model_id} and api_gateway.base_url"
    elif status == 429:
        text = f"the channel limits the rate of {role} ({said}); retry later, or lower model_routing.{role}.concurrency"
    elif 300 <= status < 400:
        text = f"the channel sends {role} elsewhere ({said}); put the address that it names into api_gateway.base_url"
    elif status < 500:
        text = f"the channel refuses this call for {role} ({said}); correct the request, or model_routing.{role}"
    else:
        text = f"the channel failed a call for {role} ({said}); retry later, or look at its own status page"
    shown = status if 400 <= status < 600 and status != 407 else 502
    return UpstreamError(text, status=shown, again=status == 429 or status >= 500, wait_s=wait_s)


def _raise_error_in(route: Route, said: Json, headers: Mapping[str, str]) -> None:
    error = said if said.get("object") == "error" else said.get("error")
    if not error:
        return
    status = _status_in(error if isinstance(error, dict) else {})
    if status is None:
        raise _no_answer(route, f"an error in the place of an answer: {_reason(said)}")
    raise failure(route, status, _reason(said), wait_s=retry_after(headers))


def _status_in(error: Json) -> int | None:
    for name in ("code", "status"):
        text = str(error.get(name, ""))
        if text.isdecimal() and 400 <= int(text) < 600:
            return int(text)
    words = f"{error.get('code')} {error.get('type')}"
    return 429 if "rate_limit" in words else None


def _raise_bad_choice(route: Route, choice: Json) -> None:
    """A choice that failed, or of a shape in which nobody could read what was said."""
    if choice.get("finish_reason") == "error":
        raise _no_answer(route, f"a choice that failed: {_snippet(choice)}")
    try:
        msgspec.convert(choice, _Choice)
    except msgspec.ValidationError as error:
        raise _no_answer(route, f"a choice of another shape ({error}): {_snippet(choice)}") from None


def _place(location: str) -> str:
    """Where a redirect leads, without a password."""
    return hint(location) if "://" in location else redact(location) or "nowhere"


def _no_answer(route: Route, what: str) -> UpstreamError:
    return UpstreamError(
        f"the channel answered {route.role} with {what}; check api_gateway.base_url and model_routing.{route.role}.model_id="
        f"{route.model_id}, or ask the channel's provider"
    )


def _reason(said: Any) -> str:
    return reason_of("null" if said is None else said)


def _snippet(said: Json) -> str:
    return reason_of(orjson.dumps(said).decode())
