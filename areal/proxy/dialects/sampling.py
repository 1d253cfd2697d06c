"""How to sample, read alike in every dialect: the same names mean the same, and the same things are refused.

    sampling = read_sampling(body, limits=("max_output_tokens",), stop="stop")
    refuse_distortion(body)          # what would change the distribution whose log-probs are recorded

Pure. Used by the dialects.
"""

from __future__ import annotations

from typing import Any

from areal.base.errors import BadRequest
from areal.base.types import SamplingParams
from areal.proxy.dialects import fields
from areal.proxy.dialects.base import LOGPROB_FLOOR, TokenLogprob
from areal.proxy.dialects.fields import JsonObject, unsupported

_NEUTRAL = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0.0}
DISTORTING = (*_NEUTRAL, "logit_bias", "chat_template", "extra_body")  # what refuse_distortion looks at


def read_sampling(
    body: JsonObject, *, limits: tuple[str, ...], stop: str, want_logprobs: bool = False, candidates: int = 0
) -> SamplingParams:
    """temperature, top_p, top_k, seed, stop_token_ids, and under this protocol's names the token limits (the smallest holds) and the
    stop texts. Raises BadRequest."""
    named = [limit for key in limits if (limit := fields.integer(body, key, low=1)) is not None]
    top_p = fields.number(body, "top_p", low=0, high=1)
    if top_p == 0:
        raise BadRequest("top_p must be above 0; for greedy sampling send temperature 0", param="top_p")
    top_k = fields.integer(body, "top_k", low=-1)
    return SamplingParams(
        max_tokens=min(named) if named else None,
        temperature=fields.number(body, "temperature", low=0, high=2),
        top_p=top_p,
        top_k=None if top_k is None else max(0, top_k),
        seed=fields.integer(body, "seed"),
        stop=_stop(body, stop),
        stop_token_ids=_stop_token_ids(body),
        top_logprobs=candidates,
        want_logprobs=want_logprobs,
    )


def top_logprobs(body: JsonObject) -> int:
    """How many candidates the client asks to see beside each token."""
    return fields.integer(body, "top_logprobs", low=0, high=20) or 0


def refuse_distortion(body: JsonObject) -> None:
    """The policy is sampled from its own distribution over its own template. Raises BadRequest for anything else."""
    for key, value in _NEUTRAL.items():
        said = fields.number(body, key)
        if said is not None and said != value:
            raise BadRequest(
                f"{key} {said:g} is not supported: the policy is sampled from its own distribution, so that what is "
                f"recorded can be trained; leave {key} out or send {value:g}",
                param=key,
                code="unsupported_parameter",
            )
    bias = fields.as_object(body.get("logit_bias") or {}, "logit_bias")
    if any(bias.values()):
        raise unsupported("logit_bias", "it changes the distribution that is recorded; leave it out")
    nested = body.get("extra_body")  # some clients send the SDK's argument itself
    if body.get("chat_template") or (isinstance(nested, dict) and nested.get("chat_template")):
        raise unsupported("chat_template", "the served model's own template is used; see chat_template_kwargs")


def shown_logprob(token: TokenLogprob) -> dict[str, Any]:
    """A sampled token in OpenAI's shape."""
    top = [_candidate(data, value) for data, value in token.top]
    return {**_candidate(token.data, token.logprob), "top_logprobs": top}


def _candidate(data: bytes, logprob: float) -> dict[str, Any]:
    # `not >=` also catches NaN; a NaN of a *sampled* token has made the interaction untrainable (recorder.py).
    value = float(logprob) if logprob >= LOGPROB_FLOOR else LOGPROB_FLOOR
    return {"token": data.decode("utf-8", "replace"), "logprob": value, "bytes": list(data)}


def _stop(body: JsonObject, key: str) -> tuple[str, ...]:
    value = body.get(key)
    texts = [value] if isinstance(value, str) else fields.items(body, key)
    stops = tuple(fields.as_text(one, f"{key}[{index}]") for index, one in enumerate(texts))
    if len(stops) > 16 or any(len(one) > 1024 for one in stops):
        raise BadRequest(f"{key} takes at most 16 texts of at most 1024 characters", param=key)
    return tuple(one for one in stops if one)  # an empty text would stop everything at once


def _stop_token_ids(body: JsonObject) -> tuple[int, ...]:
    ids = fields.items(body, "stop_token_ids")
    if any(isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < 2**31 for one in ids):
        raise BadRequest("stop_token_ids must be a list of token ids", param="stop_token_ids")
    return tuple(ids)
