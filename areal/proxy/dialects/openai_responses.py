"""OpenAI Responses: JSON <-> ModelCall, Answer and events.

    call = OpenAIResponses().parse({"input": "2+2?", "previous_response_id": "resp_1"}, headers)

`previous_response_id` goes on from any answer of the same session; as the public API has it, that call's `instructions` and `tools`
are not inherited. Every other field of the schema is honoured, echoed without effect, or refused with a sentence where it would
change what is recorded or where its answer would have to be another (stored conversations and prompts, background,
images). Unknown fields are ignored and logged once. Items are read in responses_items.py and
written in responses_output.py. Pure translation; used through the Dialect protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal.base.errors import ArealError, BadRequest
from areal.base.types import ModelCall, SamplingParams
from areal.proxy.dialects import fields
from areal.proxy.dialects.base import Answer, StreamEncoder
from areal.proxy.dialects.constraints import constrained, json_answer, openai_tool_choice
from areal.proxy.dialects.fields import JsonObject, unsupported
from areal.proxy.dialects.responses_items import parse_input, parse_tools
from areal.proxy.dialects.responses_output import ECHOED, ResponseEncoder, output_of, response
from areal.proxy.dialects.sampling import (
    DISTORTING,
    read_sampling,
    refuse_distortion,
    top_logprobs,
)
from areal.web.error_bodies import openai_error_body

LOGPROBS = "message.output_text.logprobs"
# fmt: off
KNOWN = frozenset({  # the first lines are honoured, the others ignored or refused below
    "input", "instructions", "model", "previous_response_id", "tools", "tool_choice", "temperature", "top_p", "top_k",
    "max_output_tokens", "stop", "stop_token_ids", "seed", "include", "top_logprobs", "stream", "chat_template_kwargs", "text",
    "background", "conversation", "prompt", "parallel_tool_calls",
    "metadata", "store", "reasoning", "truncation", "user", "service_tier", "stream_options",
    "max_tool_calls", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier",
    "moderation", "context_management", "client_metadata", "access_programs", "background_options", "image", "personality",
    *DISTORTING,
})
# fmt: on


class OpenAIResponses:
    """The `/responses` dialect."""

    name = "openai_responses"
    id_prefix = "resp_"
    routes: tuple[str, ...] = ("/responses",)
    count_routes: tuple[str, ...] = ("/responses/input_tokens",)

    def __init__(self) -> None:
        self._ignored = fields.Ignored("responses")

    def parse(self, body: Any, headers: Mapping[str, str]) -> ModelCall:
        if not isinstance(body, dict):
            raise BadRequest("the request body must be a JSON object with `input`", code="invalid_json")
        self._ignored.note("field", body.keys() - KNOWN)
        _refuse_what_cannot_be_kept(body)
        tools, choice = parse_tools(body), openai_tool_choice(body)
        text = fields.as_object(body.get("text") or {}, "text")
        answer = json_answer(text.get("format"), "text.format")
        self._ignored.note("tool type", tools.ignored)
        return ModelCall(
            messages=parse_input(body),
            tools=() if choice.hidden else tools.shown,
            sampling=constrained(_sampling(body), choice, answer, may_call=bool(tools.shown)),
            stream=fields.flag(body, "stream"),
            model=fields.model_name(body),
            template_kwargs=fields.as_object(body.get("chat_template_kwargs") or {}, "chat_template_kwargs"),
            retry_count=fields.retry_count(headers),
            previous=fields.text(body, "previous_response_id"),
            echo={key: body[key] for key in ECHOED & body.keys() if body[key] is not None},
        )

    def format(self, answer: Answer, call: ModelCall) -> dict[str, Any]:
        return response(answer, call, output=output_of(answer, answer.choices[0], call))

    def stream(self, call: ModelCall) -> StreamEncoder:
        return ResponseEncoder(call)

    def error_body(self, error: ArealError, request_id: str = "") -> dict[str, Any]:
        return openai_error_body(error)

    def format_count(self, tokens: int) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": tokens}


def _sampling(body: JsonObject) -> SamplingParams:
    include = fields.items(body, "include")
    return read_sampling(
        body,
        limits=("max_output_tokens",),
        stop="stop",
        want_logprobs=LOGPROBS in include,
        candidates=top_logprobs(body) if LOGPROBS in include else 0,
    )


def _refuse_what_cannot_be_kept(body: JsonObject) -> None:
    refuse_distortion(body)
    if fields.flag(body, "background"):
        raise unsupported("background", "an answer is given on the connection that asked for it; leave it out")
    for key in ("conversation", "prompt"):
        if body.get(key):
            raise unsupported(key, "nothing is stored under such an id here; send `input`, or previous_response_id")
