"""The output of a Responses answer: its items, whole or event by event, and the response object around them.

    body = response(answer, call, output=output_of(answer, choice, call))
    encoder = ResponseEncoder(call)            # one per stream: events -> `response.*` events with a sequence number

Item ids are made of the answer's id: `rs_`, `msg_` and `fc_` plus its letters plus the item's place. The items in
`response.completed` are those that were streamed. Used by openai_responses.py.
"""

from __future__ import annotations

from typing import Any

import orjson

from areal.base.errors import ArealError
from areal.base.redact import redact
from areal.base.types import ModelCall, ToolCall
from areal.chat.deltas import CallDelta
from areal.proxy.dialects.base import (
    Answer,
    Choice,
    ChoiceEnded,
    Done,
    Event,
    Failed,
    Piece,
    Started,
    TokenLogprob,
)
from areal.proxy.dialects.responses_items import namespaces
from areal.proxy.dialects.sampling import shown_logprob
from areal.web.error_bodies import openai_error_body
from areal.web.sse import PING, encode_event

DEFAULTS: dict[str, Any] = {  # what the protocol says of a request that named nothing
    "background": False, "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True,
    "previous_response_id": None, "reasoning": {"effort": None, "summary": None}, "store": True, "temperature": None,
    "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_p": None, "truncation": "disabled",
    "user": None,
}  # fmt: skip
ECHOED = frozenset(DEFAULTS) - {"background"} | {
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "top_logprobs",
}


def response(answer: Answer, call: ModelCall, *, output: list[Any], status: str = "") -> dict[str, Any]:
    """The response object. status: empty for an answer that is complete, which decides by its choice."""
    done = answer.choices[0] if answer.choices and not status else None
    cut = done is not None and done.finish_reason == "length"
    return {
        **DEFAULTS,
        **call.echo,
        "id": answer.id,
        "object": "response",
        "created_at": answer.created,
        "model": answer.model,
        "status": status or ("incomplete" if cut else "completed"),
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output,
        "usage": _usage(answer) if done is not None else None,
    }


def output_of(answer: Answer, choice: Choice, call: ModelCall) -> list[dict[str, Any]]:
    """The items of a finished choice: reasoning, message, calls."""
    said, status = choice.message, "incomplete" if choice.finish_reason == "length" else "completed"
    items: list[dict[str, Any]] = []
    if said.reasoning:
        items.append(_reasoning_item(item_id("rs", answer, 0), said.reasoning))
    if said.content or not said.tool_calls:
        tokens = choice.tokens if call.sampling.want_logprobs else ()
        items.append(_message_item(item_id("msg", answer, len(items)), said.content, tokens, status))
    flat = namespaces(call.echo.get("tools"))
    for one in said.tool_calls:
        items.append(_call_item(item_id("fc", answer, len(items)), one, flat, status))
    return items


def item_id(kind: str, answer: Answer, place: int) -> str:
    return f"{kind}_{answer.id.partition('_')[2]}{place}"


class ResponseEncoder:
    """Events of one streamed answer: created, in_progress, per item added, deltas, done; completed or incomplete."""

    ping = PING

    def __init__(self, call: ModelCall) -> None:
        self._call = call
        self._answer: Answer | None = None
        self._flat = namespaces(call.echo.get("tools"))
        self._sequence = 0
        self._output: list[dict[str, Any]] = []  # items that are done
        self._open = ""  # the type of the item that is open
        self._said = ""  # its text or arguments so far
        self._tokens: list[TokenLogprob] = []
        self._tool = CallDelta(-1)  # the first piece of the call that is open, or was the last

    def encode(self, event: Event) -> bytes:
        match event:
            case Started(answer):
                self._answer = answer
                begun = response(answer, self._call, output=[], status="in_progress")
                return self._sse("response.created", response=begun) + self._sse("response.in_progress", response=begun)
            case Piece():
                return self._piece(event)
            case ChoiceEnded(choice):
                return self._end(choice)
            case Done(answer):
                body = response(answer, self._call, output=self._output)
                return self._sse(f"response.{body['status']}", response=body)
            case Failed(error):
                return self._failed(error)

    def _piece(self, piece: Piece) -> bytes:
        # One piece may hold the end of a call and what the model said behind it: the open item is served first.
        going_on = [tool for tool in piece.tools if self._open == "function_call" and tool.index == self._tool.index]
        parts = [self._tool_delta(tool) for tool in going_on]
        if piece.reasoning:
            parts.append(self._begin("reasoning"))
            self._said += piece.reasoning
            parts.append(self._item_event("reasoning_text.delta", content_index=0, delta=piece.reasoning))
        if piece.text:
            parts.append(self._begin("message"))
            self._said += piece.text
            tokens = piece.tokens if self._call.sampling.want_logprobs else ()
            self._tokens += tokens
            shown = [shown_logprob(one) for one in tokens]
            parts.append(self._item_event("output_text.delta", content_index=0, delta=piece.text, logprobs=shown))
        parts += [self._tool_delta(tool) for tool in piece.tools if tool not in going_on]
        return b"".join(parts)

    def _tool_delta(self, tool: CallDelta) -> bytes:
        begun = b""
        if tool.index > self._tool.index:
            begun = self._close()
            self._tool = tool
            begun += self._begin("function_call")
        if not tool.arguments:
            return begun
        self._said += tool.arguments
        return begun + self._item_event("function_call_arguments.delta", delta=tool.arguments)

    def _begin(self, kind: str) -> bytes:
        """Open an item of this type unless it is open."""
        if self._open == kind:
            return b""
        closed = self._close()
        self._open, self._said, self._tokens = kind, "", []
        empty = {**self._item("in_progress"), **({"content": []} if kind == "message" else {})}
        opened = self._sse("response.output_item.added", output_index=len(self._output), item=empty)
        if kind == "message":
            opened += self._item_event("content_part.added", content_index=0, part=_text_part("", []))
        return closed + opened

    def _close(self, status: str = "completed") -> bytes:
        """End the open item, if there is one."""
        if not self._open:
            return b""
        item, ended = self._item(status), b""
        if self._open == "message":
            (part,) = item["content"]
            said = {"text": part["text"], "logprobs": part["logprobs"]}
            ended = self._item_event("output_text.done", content_index=0, **said)
            ended += self._item_event("content_part.done", content_index=0, part=part)
        elif self._open == "reasoning":
            ended = self._item_event("reasoning_text.done", content_index=0, text=self._said)
        else:
            said = {"name": item["name"], "arguments": self._said}
            ended = self._item_event("function_call_arguments.done", **said)
        ended += self._sse("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._open = ""
        return ended

    def _end(self, choice: Choice) -> bytes:
        empty = b""
        if not choice.message.content and not choice.message.tool_calls:  # well-formed: a message that says nothing
            empty = self._begin("message")
        elif self._open == "message" and self._call.sampling.want_logprobs and not choice.message.tool_calls:
            self._tokens = list(choice.tokens)  # end tokens, too, which show no text
        return empty + self._close("incomplete" if choice.finish_reason == "length" else "completed")

    def _failed(self, error: ArealError) -> bytes:
        if self._answer is None:  # the headers were sent, but nothing was sampled: there is no response to speak of
            top = {"code": error.code, "message": redact(str(error)), "param": error.param}
            return self._sse("error", **top, **openai_error_body(error))
        body = response(self._answer, self._call, output=self._output, status="failed")
        body["error"] = {"code": "server_error", "message": redact(str(error))}
        return self._sse("response.failed", response=body)

    def _item(self, status: str) -> dict[str, Any]:
        """The open item as it is now."""
        assert self._answer is not None
        place = len(self._output)
        if self._open == "message":
            return _message_item(item_id("msg", self._answer, place), self._said, tuple(self._tokens), status)
        if self._open == "reasoning":
            return _reasoning_item(item_id("rs", self._answer, place), self._said)
        call = ToolCall(self._tool.id, self._tool.name, self._said)
        return _call_item(item_id("fc", self._answer, place), call, self._flat, status)

    def _item_event(self, kind: str, **more: Any) -> bytes:
        assert self._answer is not None
        place, prefix = len(self._output), {"message": "msg", "reasoning": "rs"}.get(self._open, "fc")
        return self._sse(f"response.{kind}", item_id=item_id(prefix, self._answer, place), output_index=place, **more)

    def _sse(self, kind: str, **more: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._sequence, **more}
        self._sequence += 1
        return encode_event(orjson.dumps(body), kind)


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def _text_part(text: str, logprobs: list[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _message_item(name: str, text: str, tokens: tuple[TokenLogprob, ...], status: str) -> dict[str, Any]:
    part = _text_part(text, [shown_logprob(one) for one in tokens])
    return {"id": name, "type": "message", "status": status, "role": "assistant", "content": [part]}


def _reasoning_item(name: str, text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"id": name, "type": "reasoning", "summary": [], "content": content}


def _call_item(name: str, call: ToolCall, flat: dict[str, tuple[str, str]], status: str) -> dict[str, Any]:
    namespace, bare = flat.get(call.name, ("", call.name))
    item = {"id": name, "type": "function_call", "status": status, "call_id": call.id, "name": bare}
    return {**item, **({"namespace": namespace} if namespace else {}), "arguments": call.arguments}
