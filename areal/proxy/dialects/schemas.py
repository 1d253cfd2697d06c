"""What may be said in each public protocol, as JSON Schemas: the fields that docs/http.md explains in words.

    CHAT, RESPONSES, MESSAGES        # request bodies; every name in a dialect's KNOWN is a property
    CHAT_ANSWER, RESPONSES_ANSWER, MESSAGES_ANSWER

A body that fits its schema is understood, though it may still be refused (400) where what it says cannot be kept; a body that does not
fit is refused, but for unknown fields and what is ignored. Held to the parsers by tests/gateway/test_openapi.py and, with random bodies, by tests/fuzz. Data only; used by
gateway/openapi.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from areal.proxy.dialects import anthropic_messages, openai_chat, openai_responses
from areal.proxy.dialects.fields import LONGEST_MODEL_NAME, MOST_ITEMS

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
ANY: Schema = {}
OBJECT: Schema = {"type": "object"}


def nullable(schema: Schema) -> Schema:
    """Null always means the same as absent."""
    if "type" in schema and isinstance(schema["type"], str):
        return {**schema, "type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def array(item: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": item, "maxItems": MOST_ITEMS, **bounds}


def record(properties: dict[str, Schema], required: Iterable[str] = ()) -> Schema:
    """An object; what else stands in it is ignored."""
    needed = list(required)
    return {"type": "object", "properties": properties, **({"required": needed} if needed else {})}


def _whole(low: int, high: int = 2**63 - 1) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def _part(*kinds: str) -> Schema:
    return record({"type": {"enum": list(kinds)}, "text": TEXT}, ["type", "text"])


def _content(*kinds: str) -> Schema:
    """A text, or its parts."""
    return {"anyOf": [TEXT, array(_part(*kinds)), {"type": "null"}]}


_FLAG = nullable({"type": "boolean"})
_LIMIT = nullable(_whole(1))
_STOP = nullable({"anyOf": [{**TEXT, "maxLength": 1024}, array({**TEXT, "maxLength": 1024}, maxItems=16)]})
_FUNCTION_SCHEMA = nullable(OBJECT)
_SAMPLING: dict[str, Schema] = {  # the same in every protocol
    "model": nullable({**TEXT, "maxLength": LONGEST_MODEL_NAME}),
    "temperature": nullable({"type": "number", "minimum": 0, "maximum": 2}),
    "top_p": nullable({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
    "top_k": nullable(_whole(-1)),
    "seed": nullable(_whole(-(2**63))),
    "stop_token_ids": nullable(array(_whole(0, 2**31 - 1))),
    "stream": _FLAG,
    "chat_template_kwargs": nullable(OBJECT),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty", "min_p"), nullable({"type": "number"})),
    "logit_bias": nullable(OBJECT),
}  # fmt: skip

_CHAT_TEXTS = _content("text")
_CALL = record(
    {"id": TEXT, "type": {"const": "function"}, "function": record({"name": TEXT, "arguments": TEXT}, ["name"])},
    ["id", "function"],
)
_CHAT_MESSAGE: Schema = {
    "oneOf": [
        record({"role": {"enum": ["system", "developer", "user"]}, "content": _CHAT_TEXTS}, ["role"]),
        record(
            {
                "role": {"const": "assistant"},
                "content": _CHAT_TEXTS,
                "reasoning_content": nullable(TEXT),
                "tool_calls": nullable(array(_CALL)),
            },
            ["role"],
        ),
        record(
            {"role": {"const": "tool"}, "content": _CHAT_TEXTS, "tool_call_id": {**TEXT, "minLength": 1}},
            ["role", "tool_call_id"],
        ),
    ]
}
_NAME = {**TEXT, "minLength": 1}
_CHAT_TOOL = record(
    {
        "type": {"const": "function"},
        "function": record(
            {"name": _NAME, "description": nullable(TEXT), "parameters": _FUNCTION_SCHEMA},
            ["name"],
        ),
    },
    ["type", "function"],
)
_RESPONSES_TOOL = record(
    {
        "type": {"const": "function"},
        "name": _NAME,
        "description": nullable(TEXT),
        "parameters": _FUNCTION_SCHEMA,
    },
    ["type", "name"],
)
_ITEM_TEXTS = _content("input_text", "output_text")
_ITEM: Schema = {
    "oneOf": [
        record(
            {
                "type": {"const": "message"},
                "role": {"enum": ["system", "developer", "user", "assistant"]},
                "content": _ITEM_TEXTS,
            },
            ["role"],
        ),
        record(
            {"type": {"const": "function_call"}, "call_id": TEXT, "name": TEXT, "arguments": TEXT},
            ["type", "call_id", "name"],
        ),
        record(
            {"type": {"const": "function_call_output"}, "call_id": TEXT, "output": _ITEM_TEXTS},
            ["type", "call_id"],
        ),
        record(
            {"type": {"const": "reasoning"}, "summary": array(record({"text": TEXT})), "content": array(record({}))},
            ["type"],
        ),
    ]
}
_BLOCK_TEXTS = _content("text")
_USER_BLOCK: Schema = {
    "oneOf": [
        _part("text"),
        record(
            {"type": {"const": "tool_result"}, "tool_use_id": TEXT, "content": _BLOCK_TEXTS}, ["type", "tool_use_id"]
        ),
    ]
}
_ASSISTANT_BLOCK: Schema = {
    "oneOf": [
        _part("text"),
        record(
            {"type": {"const": "tool_use"}, "id": TEXT, "name": TEXT, "input": OBJECT},
            ["type", "id", "name", "input"],
        ),
        record({"type": {"const": "thinking"}, "thinking": TEXT, "signature": TEXT}, ["type", "thinking"]),
    ]
}


def _turn(role: str, block: Schema) -> Schema:
    return record({"role": {"const": role}, "content": {"anyOf": [TEXT, array(block)]}}, ["role", "content"])


def _request(known: frozenset[str], own: dict[str, Schema], required: Iterable[str] = ()) -> Schema:
    """own: what this protocol says in its own way. The rest of `known` is any value, ignored or refused with a sentence."""
    named = {**_SAMPLING, **own}
    return record({name: named.get(name, ANY) for name in sorted(known)}, required)


CHAT = _request(
    openai_chat.KNOWN,
    {
        "messages": array(_CHAT_MESSAGE, minItems=1),
        "tools": nullable(array(_CHAT_TOOL)),
        "tool_choice": {"anyOf": [TEXT, OBJECT, {"type": "null"}]},
        "max_tokens": _LIMIT,
        "max_completion_tokens": _LIMIT,
        "stop": _STOP,
        "n": nullable(_whole(1, openai_chat.MAX_CHOICES)),
        "logprobs": _FLAG,
        "top_logprobs": nullable(_whole(0, 20)),
        "stream_options": nullable(record({"include_usage": _FLAG})),
        "response_format": nullable(OBJECT),
        "modalities": nullable(array(TEXT)),
    },
    ["messages"],
)
RESPONSES = _request(
    openai_responses.KNOWN,
    {
        "input": nullable({"anyOf": [TEXT, array(_ITEM)]}),
        "instructions": _content("input_text", "text"),
        "previous_response_id": nullable(TEXT),
        "tools": nullable(array(_RESPONSES_TOOL)),
        "tool_choice": {"anyOf": [TEXT, OBJECT, {"type": "null"}]},
        "max_output_tokens": _LIMIT,
        "stop": _STOP,
        "include": nullable(array(TEXT)),
        "top_logprobs": nullable(_whole(0, 20)),
        "text": nullable(OBJECT),
        "background": _FLAG,
    },
)
MESSAGES = _request(
    anthropic_messages.KNOWN,
    {
        "messages": array(
            {"oneOf": [_turn("user", _USER_BLOCK), _turn("assistant", _ASSISTANT_BLOCK), _turn("system", _part("text"))]},
            minItems=1,
        ),
        "system": _BLOCK_TEXTS,
        "thread": nullable(OBJECT),
        "tools": nullable(
            array(record({"name": _NAME, "description": nullable(TEXT), "input_schema": OBJECT}, ["name", "input_schema"]))
        ),
        "tool_choice": nullable(OBJECT),
        "max_tokens": _LIMIT,
        "stop_sequences": nullable(array({**TEXT, "maxLength": 1024}, maxItems=16)),
    },
    ["messages"],
)  # fmt: skip

_COUNT = _whole(0)
CHAT_ANSWER = record(
    {
        "id": {**TEXT, "pattern": "^chatcmpl-"},
        "object": {"const": "chat.completion"},
        "created": _COUNT,
        "model": TEXT,
        "choices": array(
            record(
                {
                    "index": _COUNT,
                    "message": record({"role": {"const": "assistant"}, "content": nullable(TEXT)}, ["role", "content"]),
                    "logprobs": nullable(OBJECT),
                    "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
                },
                ["index", "message", "logprobs", "finish_reason"],
            ),
            minItems=1,
        ),
        "usage": record(dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), _COUNT), ["prompt_tokens"]),
    },
    ["id", "object", "created", "model", "choices", "usage"],
)  # fmt: skip
RESPONSES_ANSWER = record(
    {
        "id": {**TEXT, "pattern": "^resp_"},
        "object": {"const": "response"},
        "status": {"enum": ["completed", "incomplete"]},
        "output": array(record({"type": {"enum": ["message", "reasoning", "function_call"]}}, ["type"])),
        "usage": record(dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), _COUNT), ["input_tokens"]),
    },
    ["id", "object", "status", "output", "usage"],
)
MESSAGES_ANSWER = record(
    {
        "id": {**TEXT, "pattern": "^msg_"},
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "content": array(record({"type": {"enum": ["text", "thinking", "tool_use"]}}, ["type"])),
        "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        "usage": record(dict.fromkeys(("input_tokens", "output_tokens"), _COUNT), ["input_tokens", "output_tokens"]),
    },
    ["id", "type", "role", "content", "stop_reason", "usage"],
)
COUNT_ANSWER = record({"input_tokens": _COUNT}, ["input_tokens"])
