"""Chat Completions from its other side: a call of any protocol as a request to a channel, and the channel's answer as our events.

    body = chat_request(call)                          # ModelCall -> what POST /chat/completions takes
    answer = read_chat_answer(said, call, "msg_")      # its answer -> Answer, for dialect.format
    events = ChatEvents(call, "resp_")                 # its chunks -> Started, Piece, ..., for dialect.stream's encoder
    events.feed(chunk); events.end()                   # end(): ChoiceEnded and Done, whatever the stream left out (T105)

So the Messages and Responses front ends serve models that know neither. Reasoning of earlier turns is not sent: channels differ in
what they take it as. Pure translation; used by gateway/channel.py.
"""

from __future__ import annotations

import builtins
import time
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import orjson

from areal.base.types import Constraint, FinishReason, Message, ModelCall, ToolCall
from areal.chat.deltas import CallDelta, Delta, ReasoningDelta, TextDelta, call_id, fold
from areal.proxy.dialects.base import Answer, Choice, ChoiceEnded, Done, Event, Piece, Started, TokenLogprob
from areal.proxy.dialects.openai_messages import calls_json

Json = dict[str, Any]
_REASONS: Mapping[str, FinishReason] = {"length": "length", "tool_calls": "tool_calls", "function_call": "tool_calls"}


def chat_request(call: ModelCall) -> Json:
    """The body without model and stream; what the call does not name is left out."""
    asked = call.sampling
    body: Json = {"messages": [_message(message) for message in call.messages]}
    named = {
        "max_tokens": asked.max_tokens,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "seed": asked.seed,
        "stop": list(asked.stop) or None,
        "stop_token_ids": list(asked.stop_token_ids) or None,
        "logprobs": asked.want_logprobs or None,
        "top_logprobs": asked.top_logprobs or None,
        "chat_template_kwargs": dict(call.template_kwargs) or None,
    }
    body |= {name: value for name, value in named.items() if value is not None}
    if call.tools:
        body["tools"] = [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
            }
            for tool in call.tools
        ]
    if asked.constraint is not None:
        body |= _forced(asked.constraint)
    if call.stream:
        body["stream_options"] = {"include_usage": True}  # both protocols end with the usage
    return body


def read_chat_answer(said: Json, call: ModelCall, id_prefix: str) -> Answer:
    """A whole answer; the first of its choices, as both protocols have one."""
    first = said["choices"][0]
    message = _said(first["message"])
    tokens = _logprobs(first.get("logprobs"))
    return _answer(
        call, id_prefix + call_id(29), time.time(), said.get("usage"), message, first.get("finish_reason"), tokens
    )


class ChatEvents:
    """The events of one streamed answer, made of its chunks."""

    def __init__(self, call: ModelCall, id_prefix: str) -> None:
        self._call, self._id, self._at = call, id_prefix + call_id(29), time.time()
        self._begun = False
        self._deltas: list[Delta] = []
        self._tokens: list[TokenLogprob] = []
        self._places: dict[object, int] = {}  # the channel's index of a tool call -> ours
        self._reason: str | None = None
        self._usage: Any = None

    def feed(self, chunk: Json) -> list[Event]:
        """Of one chunk; one without choices may carry the usage (T105)."""
        self._usage = chunk.get("usage") or self._usage
        events: list[Event] = []
        if not self._begun:
            self._begun = True
            prompt, _, cached = _counts(self._usage)
            events.append(Started(Answer(self._id, self._call.model, int(self._at), prompt, (), cached)))
        for choice in chunk["choices"]:
            if choice.get("index") in (0, None):
                self._reason = choice.get("finish_reason") or self._reason
                events += self._piece(choice)
        return events

    def end(self) -> list[Event]:
        """What closes the answer."""
        answer = _answer(
            self._call, self._id, self._at, self._usage, fold(self._deltas), self._reason, tuple(self._tokens)
        )
        return [ChoiceEnded(answer.choices[0]), Done(answer)]

    def _piece(self, choice: Json) -> list[Event]:
        delta = choice.get("delta") or {}
        text, reasoning = _text(delta.get("content")), _reasoning(delta)
        tools = tuple(self._tool(one) for one in delta.get("tool_calls") or ())
        tokens = _logprobs(choice.get("logprobs"))
        self._tokens += tokens
        self._deltas += [
            *([ReasoningDelta(reasoning)] if reasoning else []),
            *([TextDelta(text)] if text else []),
            *tools,
        ]
        if not (text or reasoning or tools or tokens):
            return []
        return [Piece(0, text, reasoning, tools, tokens)]

    def _tool(self, said: Json) -> CallDelta:
        index = said.get("index")
        if index is None:  # some channels send whole calls without one
            index = len(self._places) if said.get("id") or not self._places else list(self._places)[-1]
        new = index not in self._places
        place = self._places.setdefault(index, len(self._places))
        function = said.get("function") or {}
        arguments = _arguments(function.get("arguments"))
        if not new:
            return CallDelta(place, arguments=arguments)
        return CallDelta(place, said.get("id") or call_id(), function.get("name") or "", arguments)


def _answer(
    call: ModelCall,
    name: str,
    at: float,
    usage: Any,
    message: Message,
    reason: str | None,
    tokens: tuple[TokenLogprob, ...],
) -> Answer:
    prompt, output, cached = _counts(usage)
    finish: FinishReason = _REASONS.get(reason or "", "tool_calls" if message.tool_calls else "stop")
    choice = Choice(0, name, message, finish, output, tokens)
    return Answer(name, call.model, int(at), prompt, (choice,), cached)


def _message(message: Message) -> Json:
    said: Json = {"role": message.role, "content": message.content}
    if message.tool_calls:
        said["content"] = message.content or None
        said["tool_calls"] = calls_json(message.tool_calls)
    if message.tool_call_id:
        said["tool_call_id"] = message.tool_call_id
    if message.name and message.role != "tool":
        said["name"] = message.name
    return said


def _forced(wanted: Constraint) -> Json:
    """tool_choice and response_format, which proxy/dialects/constraints.py read."""
    body: Json = {} if wanted.parallel else {"parallel_tool_calls": False}
    if wanted.schema is not None:
        form: Json = {"type": "json_object"}
        if dict(wanted.schema) != {"type": "object"}:
            schema = {"name": "answer", "schema": dict(wanted.schema), "strict": not wanted.lenient}
            form = {"type": "json_schema", "json_schema": schema}
        return body | {"response_format": form}
    if wanted.calls is None:
        return body
    tools = [{"type": "function", "function": {"name": name}} for name in wanted.calls]
    if not tools:
        return body | {"tool_choice": "required"}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools}}
    return body | {"tool_choice": tools[0] if len(tools) == 1 else allowed}


def _said(message: Json) -> Message:
    calls = tuple(
        ToolCall(one.get("id") or call_id(), function.get("name") or "", _arguments(function.get("arguments")))
        for one in message.get("tool_calls") or ()
        if (function := one.get("function") or {})
    )
    return Message("assistant", _text(message.get("content")), reasoning=_reasoning(message), tool_calls=calls)


def _text(content: object) -> str:
    """A text, or the text parts of a list; anything else says nothing."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))


def _reasoning(said: Json) -> str:
    """Under either of the names that channels have for it."""
    return _text(said.get("reasoning_content")) or _text(said.get("reasoning"))


def _arguments(said: object) -> str:
    """Of a call: a text, as the protocol has it, or the object itself."""
    return said if isinstance(said, str) else "" if said is None else orjson.dumps(said).decode()


def _counts(usage: Any) -> tuple[int, int, int]:
    """Prompt, output and cached prompt tokens, 0 where they are not said."""
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("prompt_tokens_details")
    cached_said = details.get("cached_tokens") if isinstance(details, dict) else None
    found = (usage.get("prompt_tokens"), usage.get("completion_tokens"), cached_said)
    prompt, output, cached = (count if isinstance(count, int) else 0 for count in found)
    return prompt, output, cached


class _Token(msgspec.Struct):
    token: str = ""
    logprob: float | None = None
    bytes: list[Annotated[int, msgspec.Meta(ge=0, le=255)]] | None = None
    top_logprobs: list[_Token] | None = None

    def candidate(self) -> tuple[builtins.bytes, float]:
        data = builtins.bytes(self.bytes) if self.bytes else self.token.encode("utf-8", "surrogatepass")
        return data, self.logprob or 0.0


def _logprobs(said: Any) -> tuple[TokenLogprob, ...]:
    """None of another shape than the protocol's: they stand beside an answer and are not it."""
    content = said.get("content") if isinstance(said, dict) else None
    try:
        tokens = msgspec.convert(content or [], list[_Token])
    except msgspec.ValidationError:
        return ()
    return tuple(
        TokenLogprob(*one.candidate(), top=tuple(other.candidate() for other in one.top_logprobs or ()))
        for one in tokens
    )
