"""OpenAI Chat Completions: JSON <-> ModelCall, Answer and events.

    call = OpenAIChat().parse({"messages": [{"role": "user", "content": "2+2?"}]}, headers)

Every field of the public schema is honoured, ignored because it changes no token (user, metadata, store, service_tier,
reasoning_effort ...), or refused with a sentence because it would change the distribution that is recorded
(penalties, logit_bias) or cannot be kept (n > 16, images, audio). Unknown fields are
ignored and logged once. Text parts are joined with a newline. Excluded candidates have log-probability -9999.
Messages are read in openai_messages.py. Pure translation; used by app.py through the Dialect protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from areal.base.errors import ArealError, BadRequest
from areal.base.types import ModelCall, SamplingParams
from areal.proxy.dialects import fields
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
    TokenLogprob,
)
from areal.proxy.dialects.constraints import constrained, json_answer, openai_tool_choice
from areal.proxy.dialects.fields import JsonObject, unsupported
from areal.proxy.dialects.openai_messages import calls_json, parse_messages, parse_tools
from areal.proxy.dialects.sampling import (
    DISTORTING,
    read_sampling,
    refuse_distortion,
    shown_logprob,
    top_logprobs,
)
from areal.web.error_bodies import openai_error_body

MAX_CHOICES = 16
# fmt: off
KNOWN = frozenset({  # the first lines are honoured, the others ignored or refused below
    "messages", "model", "tools", "tool_choice", "temperature", "top_p", "top_k", "max_tokens",
    "max_completion_tokens", "stop", "stop_token_ids", "seed", "n", "logprobs", "top_logprobs", "stream",
    "stream_options", "chat_template_kwargs", "response_format", "parallel_tool_calls",
    "user", "metadata", "store", "service_tier", "reasoning_effort", "verbosity",
    "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "moderation", "safety_identifier",
    "prediction", "audio", "modalities", "functions", "function_call", "web_search_options", *DISTORTING,
})
# fmt: on


class OpenAIChat:
    """The `/chat/completions` dialect."""

    name = "openai_chat"
    id_prefix = "chatcmpl-"
    routes: tuple[str, ...] = ("/chat/completions",)

    def __init__(self) -> None:
        self._ignored = fields.Ignored("chat completions")

    def parse(self, body: Any, headers: Mapping[str, str]) -> ModelCall:
        if not isinstance(body, dict):
            raise BadRequest("the request body must be a JSON object with `messages`", code="invalid_json")
        self._ignored.note("field", body.keys() - KNOWN)
        _refuse_what_cannot_be_kept(body)
        tools, choice = parse_tools(body), openai_tool_choice(body)
        answer = json_answer(body.get("response_format"), "response_format", inside="json_schema")
        return ModelCall(
            messages=parse_messages(body),
            tools=() if choice.hidden else tools,
            sampling=constrained(_sampling(body), choice, answer, may_call=bool(tools)),
            stream=fields.flag(body, "stream"),
            model=fields.model_name(body),
            n=fields.integer(body, "n", low=1, high=MAX_CHOICES) or 1,
            include_usage=_include_usage(body),
            template_kwargs=fields.as_object(body.get("chat_template_kwargs") or {}, "chat_template_kwargs"),
            retry_count=fields.retry_count(headers),
        )

    def format(self, answer: Answer, call: ModelCall) -> dict[str, Any]:
        return {
            "id": answer.id,
            "object": "chat.completion",
            "created": answer.created,
            "model": answer.model,
            "choices": [_format_choice(choice, call) for choice in answer.choices],
            "usage": _usage(answer),
        }

    def stream(self, call: ModelCall) -> StreamEncoder:
        return _ChunkEncoder(call)

    def error_body(self, error: ArealError, request_id: str = "") -> dict[str, Any]:
        return openai_error_body(error)


class _ChunkEncoder:
    """Events -> `chat.completion.chunk` lines: role first, deltas, finish_reason, usage if asked for, [DONE]."""

    ping = b": ping\n\n"

    def __init__(self, call: ModelCall) -> None:
        self._call = call
        self._head: dict[str, Any] = {}
        self._around: dict[int, tuple[bytes, bytes]] = {}  # by choice, what stands before and behind a text alone

    def encode(self, event: Event) -> bytes:
        match event:
            case Started(answer):
                self._head = {"id": answer.id, "object": "chat.completion.chunk", "created": answer.created}
                self._head["model"] = answer.model
                role = {"role": "assistant", "content": ""}
                return b"".join(self._chunk(index, role) for index in range(self._call.n))
            case Piece():
                return self._piece(event)
            case ChoiceEnded(choice):
                return self._chunk(choice.index, {}, finish_reason=choice.finish_reason)
            case Done(answer):
                usage = (
                    _sse({**self._head, "choices": [], "usage": _usage(answer)}) if self._call.include_usage else b""
                )
                return usage + b"data: [DONE]\n\n"
            case Failed(error):
                return _sse(openai_error_body(error))

    def _piece(self, piece: Piece) -> bytes:
        if piece.text and not (piece.reasoning or piece.tools or piece.tokens):  # as almost every chunk is
            return self._text(piece.choice, piece.text)
        delta: dict[str, Any] = {}
        if piece.text:
            delta["content"] = piece.text
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.tools:
            delta["tool_calls"] = [
                {
                    "index": tool.index,
                    **({"id": tool.id, "type": "function"} if tool.id else {}),
                    "function": {**({"name": tool.name} if tool.name else {}), "arguments": tool.arguments},
                }
                for tool in piece.tools
            ]
        tokens = piece.tokens if self._call.sampling.want_logprobs else ()
        return self._chunk(piece.choice, delta, tokens=tokens) if delta or tokens else b""

    def _text(self, index: int, text: str) -> bytes:
        if index not in self._around:
            before, _, after = self._chunk(index, {"content": ""}).partition(b'"content":""')
            self._around[index] = before + b'"content":', after
        before, after = self._around[index]
        return before + orjson.dumps(text) + after

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        tokens: tuple[TokenLogprob, ...] = (),
        finish_reason: str | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        if tokens:
            choice["logprobs"] = _logprobs(tokens)
        usage = {"usage": None} if self._call.include_usage else {}
        return _sse({**self._head, "choices": [choice], **usage})


def _sse(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def _format_choice(choice: Choice, call: ModelCall) -> dict[str, Any]:
    said = choice.message
    message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
    if said.tool_calls:
        message["content"] = said.content or None
        message["tool_calls"] = calls_json(said.tool_calls)
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    return {
        "index": choice.index,
        "message": message,
        "logprobs": _logprobs(choice.tokens) if call.sampling.want_logprobs else None,
        "finish_reason": choice.finish_reason,
    }


def _logprobs(tokens: tuple[TokenLogprob, ...]) -> dict[str, Any]:
    return {"content": [shown_logprob(token) for token in tokens], "refusal": None}


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def _sampling(body: JsonObject) -> SamplingParams:
    want_logprobs = fields.flag(body, "logprobs")
    candidates = top_logprobs(body)
    if candidates and not want_logprobs:
        raise BadRequest("top_logprobs needs logprobs: true beside it", param="top_logprobs")
    return read_sampling(
        body,
        limits=("max_tokens", "max_completion_tokens"),
        stop="stop",
        want_logprobs=want_logprobs,
        candidates=candidates,
    )


def _include_usage(body: JsonObject) -> bool:
    options = body.get("stream_options")
    return options is not None and fields.flag(
        fields.as_object(options, "stream_options"), "include_usage", at="stream_options."
    )


def _refuse_what_cannot_be_kept(body: JsonObject) -> None:
    refuse_distortion(body)
    if any(fields.as_text(one, "modalities") != "text" for one in fields.items(body, "modalities")):
        raise unsupported("modalities", "the model writes text only; send ['text'] or leave it out")
    for key in ("functions", "web_search_options"):
        if body.get(key):
            raise unsupported(key, "describe functions in `tools`")
