"""Anthropic Messages: JSON <-> ModelCall, Answer and events.

    call = AnthropicMessages().parse({"max_tokens": 64, "messages": [{"role": "user", "content": "2+2?"}]}, headers)

Agents add fields of their own and cannot be told to stop, so what is not understood is ignored and logged once (T027); what would
change the recorded distribution, and images are refused with a sentence. A `thread` that continues takes system, tools and
history from its answer, as the protocol has it (the SDK's tool runner sends only what is new). Usage counts the whole prompt as
input_tokens, and `count_tokens` says the same number beforehand. A thinking block's signature is its answer's id, so that clients which
drop unsigned thinking send it back. Messages are read in anthropic_content.py. Pure translation; used through the Dialect protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from areal.base.errors import ArealError, BadRequest
from areal.base.types import Constraint, FinishReason, Message, ModelCall
from areal.chat.deltas import CallDelta
from areal.proxy.dialects import fields
from areal.proxy.dialects.anthropic_content import parse_messages, parse_tools, tool_input
from areal.proxy.dialects.base import (
    Answer,
    Choice,
    ChoiceEnded,
    Done,
    Event,
    Failed,
    Piece,
    Started,
    StreamEncoder,
)
from areal.proxy.dialects.constraints import ToolChoice, constrained, json_answer
from areal.proxy.dialects.fields import JsonObject, unsupported
from areal.proxy.dialects.sampling import DISTORTING, read_sampling, refuse_distortion
from areal.web.error_bodies import anthropic_error_body
from areal.web.sse import encode_event

# fmt: off
KNOWN = frozenset({  # the first lines are honoured, the others ignored or refused
    "messages", "system", "model", "max_tokens", "tools", "tool_choice", "temperature", "top_p", "top_k",
    "stop_sequences", "stop_token_ids", "seed", "stream", "chat_template_kwargs", "thread", "output_config",
    "output_format",
    "metadata", "service_tier", "thinking", "context_management", "container",
    "mcp_servers", "cache_control", "inference_geo", "betas", "safeguards", "diagnostics", "speed",
    "user_profile_id", "workspace_id", "billing_policy", "compaction", "fallback_credit_token", "fallbacks", *DISTORTING,
})
# fmt: on
# Claude Code has titles written under its agent's own model name; of its own calls, those alone ask for JSON without a tool.
_TITLED = "claude-cli/"
STOP_REASONS: Mapping[FinishReason, str] = {"length": "max_tokens", "tool_calls": "tool_use"}


class AnthropicMessages:
    """The `/messages` dialect."""

    name = "anthropic_messages"
    id_prefix = "msg_"
    routes: tuple[str, ...] = ("/messages",)
    count_routes: tuple[str, ...] = ("/messages/count_tokens",)

    def __init__(self) -> None:
        self._ignored = fields.Ignored("messages")

    def parse(self, body: Any, headers: Mapping[str, str]) -> ModelCall:
        if not isinstance(body, dict):
            raise BadRequest("the request body must be a JSON object with `messages`", code="invalid_json")
        self._ignored.note("field", body.keys() - KNOWN)
        refuse_distortion(body)
        tools, ignored = parse_tools(body)
        self._ignored.note("tool type", ignored)
        choice, previous = _tool_choice(body), _previous(body)
        inherits = bool(previous) and not choice.hidden
        sampling = read_sampling(body, limits=("max_tokens",), stop="stop_sequences")
        form = _json_answer(body)
        return ModelCall(
            messages=parse_messages(body),
            tools=() if choice.hidden else tools,
            sampling=constrained(sampling, choice, form, may_call=bool(tools) or inherits),
            stream=fields.flag(body, "stream"),
            model=fields.model_name(body),
            template_kwargs=fields.as_object(body.get("chat_template_kwargs") or {}, "chat_template_kwargs"),
            retry_count=fields.retry_count(headers),
            agent=fields.agent_id(headers),
            background=form is not None and not tools and headers.get("user-agent", "").startswith(_TITLED),
            previous=previous,
            inherits_tools=inherits,
        )

    def format(self, answer: Answer, call: ModelCall) -> dict[str, Any]:
        choice = answer.choices[0]
        return {**_message(answer, choice.completion_tokens), "content": _content(answer, choice), **_stopped(choice)}

    def stream(self, call: ModelCall) -> StreamEncoder:
        return _BlockEncoder()

    def error_body(self, error: ArealError, request_id: str = "") -> dict[str, Any]:
        return anthropic_error_body(error, request_id)

    def format_count(self, tokens: int) -> dict[str, Any]:
        return {"input_tokens": tokens}


class _BlockEncoder:
    """Events -> message_start, per block start, deltas and stop, message_delta, message_stop; blocks never overlap."""

    ping = encode_event(b'{"type":"ping"}', "ping")

    def __init__(self) -> None:
        self._answer_id = ""
        self._open = ""  # the kind of the open block
        self._tool = -1  # the index of the call that is open, or was the last
        self._index = -1  # of the open block, or of the last one

    def encode(self, event: Event) -> bytes:
        match event:
            case Started(answer):
                self._answer_id = answer.id
                start = {**_message(answer, 0), "content": [], "stop_reason": None, "stop_sequence": None}
                return _sse({"type": "message_start", "message": start})
            case Piece():
                return self._piece(event)
            case ChoiceEnded():
                return self._close()
            case Done(answer):
                choice = answer.choices[0]
                delta = {"type": "message_delta", "delta": _stopped(choice)}
                return _sse({**delta, "usage": _usage(answer, choice.completion_tokens)}) + _sse(
                    {"type": "message_stop"}
                )
            case Failed(error):
                return _sse(anthropic_error_body(error))

    def _piece(self, piece: Piece) -> bytes:
        # One piece may hold the end of a call and what the model said behind it: the open block is served first.
        going_on = [tool for tool in piece.tools if self._open == "tool_use" and tool.index == self._tool]
        parts = [self._tool_delta(tool) for tool in going_on]
        if piece.reasoning:
            parts.append(self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""}))
            parts.append(self._delta({"type": "thinking_delta", "thinking": piece.reasoning}))
        if piece.text:
            parts.append(self._begin("text", {"type": "text", "text": ""}))
            parts.append(self._delta({"type": "text_delta", "text": piece.text}))
        parts += [self._tool_delta(tool) for tool in piece.tools if tool not in going_on]
        return b"".join(parts)

    def _tool_delta(self, tool: CallDelta) -> bytes:
        begun = b""
        if tool.index > self._tool:
            self._tool = tool.index
            block = {"type": "tool_use", "id": tool.id, "name": tool.name, "input": {}}
            begun = self._close() + self._begin("tool_use", block)
        if not tool.arguments:
            return begun
        return begun + self._delta({"type": "input_json_delta", "partial_json": tool.arguments})

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        """Open a block of this kind unless it is open."""
        if self._open == kind:
            return b""
        closed = self._close()
        self._open = kind
        self._index += 1
        return closed + _sse({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _sse({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> bytes:
        if not self._open:
            return b""
        kind, self._open = self._open, ""
        signed = b""
        if kind == "thinking":
            signed = self._delta({"type": "signature_delta", "signature": self._answer_id})
        return signed + _sse({"type": "content_block_stop", "index": self._index})


def _sse(body: dict[str, Any]) -> bytes:
    return encode_event(orjson.dumps(body), body["type"])


def _message(answer: Answer, output_tokens: int) -> dict[str, Any]:
    head = {"id": answer.id, "type": "message", "role": "assistant", "model": answer.model}
    return {**head, "usage": _usage(answer, output_tokens)}


def _usage(answer: Answer, output_tokens: int) -> dict[str, int]:
    """Clients trim their context by the sum of these, so a recorded prefix is not taken out of input_tokens."""
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": answer.prompt_tokens, "output_tokens": output_tokens, **cached}


def _content(answer: Answer, choice: Choice) -> list[dict[str, Any]]:
    said: Message = choice.message
    content: list[dict[str, Any]] = []
    if said.reasoning:
        content.append({"type": "thinking", "thinking": said.reasoning, "signature": answer.id})
    if said.content:
        content.append({"type": "text", "text": said.content})
    for call in said.tool_calls:
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": tool_input(call.arguments)})
    return content


def _stopped(choice: Choice) -> dict[str, Any]:
    if choice.stop_text is not None and choice.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_text}
    return {"stop_reason": STOP_REASONS.get(choice.finish_reason, "end_turn"), "stop_sequence": None}


def _previous(body: JsonObject) -> str:
    """The answer that a thread goes on from. Every answer is kept under its id, so creating a thread needs nothing."""
    thread = fields.as_object(body.get("thread") or {}, "thread")
    if thread.get("type", "create") == "create":
        return ""
    if thread["type"] != "continue":
        raise fields.wrong_type("thread.type", "create or continue", thread["type"])
    for key in ("system", "tools"):
        if body.get(key):
            raise unsupported(key, "a thread has its own from when it was created; leave it out, or create another")
    return fields.as_text(thread.get("previous_message_id"), "thread.previous_message_id")


def _tool_choice(body: JsonObject) -> ToolChoice:
    said = fields.as_object(body.get("tool_choice") or {"type": "auto"}, "tool_choice")
    kind, parallel = said.get("type"), not fields.flag(said, "disable_parallel_tool_use", at="tool_choice.")
    if kind in ("auto", "none"):
        return ToolChoice(hidden=kind == "none", parallel=parallel)
    if kind == "any":
        return ToolChoice(calls=(), parallel=parallel)
    if kind == "tool":
        return ToolChoice(calls=(fields.as_text(said.get("name"), "tool_choice.name"),), parallel=parallel)
    raise fields.wrong_type("tool_choice.type", "auto, any, tool or none", kind)


def _json_answer(body: JsonObject) -> Constraint | None:
    """The format stands in `output_config`, before that it stood in `output_format`."""
    config = fields.as_object(body.get("output_config") or {}, "output_config")
    if config.get("format") is not None:
        return json_answer(config["format"], "output_config.format")
    return json_answer(body.get("output_format"), "output_format")
