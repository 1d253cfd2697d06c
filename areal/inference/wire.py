"""The inference wire: what stands in the bodies between a proxy and an inference server, both directions.

    body = encode_request(request)                     # client -> server: POST /inference/v1/generate
    request = decode_request(body)                     # server
    yield encode_chunk(chunk)                          # server -> client: one Server-Sent Event
    chunk = decode_chunk(event.data)                   # client; raises what the server said went wrong

The shape is that of vLLM's /inference/v1/generate (docs/architecture.md, "Inference wire"). JSON has neither infinity nor
NaN: a candidate of probability 0 has logprob null on the wire and -inf outside it; a sampled token without a usable logprob
has null, and NaN outside. What a server leaves out stays unknown (NaN, version -1): the proxy marks such an interaction
untrainable, numbers are never invented (T009, T054). Client: client.py. Server: app.py.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, get_args

import msgspec
import numpy as np

from areal.base.errors import (
    ArealError,
    BackendError,
    BackendTimeout,
    BadRequest,
    ContextOverflow,
    NotFound,
    Unavailable,
    WeightsArrow,
    WeightsRefused,
)
from areal.base.types import FinishReason, GenerateRequest, SamplingParams, TokenChunk
from areal.inference.backend import BackendHealth
from areal.web.sse import encode_event

PROTOCOL = 2  # of this wire; both ends compare it before anything else is said
GENERATE_PATH = "/inference/v1/generate"
CONTEXT_OVERFLOW = "context_length_exceeded"
RETRY_AFTER_S = 2  # of a server's 503: some clients give up on one that names no time


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """grammar: in Lark's notation, as vLLM's guidance backend takes it too."""

    grammar: str


class SamplingBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`seed` is GenerateRequest.rng_seed. `logprobs`: top candidates wanted per token, 0 = only the sampled one."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int = 0
    structured_outputs: StructuredOutputs | None = None


class GenerateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    request_id: str
    session_id: str
    token_ids: list[int]
    sampling_params: SamplingBody
    stream: bool = True


_Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
_Candidates = tuple[tuple[tuple[int, float | None], ...], ...]


class ChunkBody(msgspec.Struct, frozen=True, omit_defaults=True):
    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    weight_versions: tuple[int, ...]
    kept_mass: tuple[float, ...]
    finish_reason: FinishReason | None
    top: _Candidates = ()
    constrained: tuple[bool, ...] = ()


class ErrorDetail(msgspec.Struct, frozen=True, omit_defaults=True):
    """`tokens` and `maximum` go with code context_length_exceeded."""

    message: str
    code: str = "backend_error"
    tokens: int = 0
    maximum: int = 0


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class HealthBody(msgspec.Struct, frozen=True):
    protocol: int
    model: str
    version: int
    max_context: int
    running: int
    waiting: int
    kv_tokens_free: int


class LoadWeightsBody(msgspec.Struct, frozen=True):
    """within_s: the server gives up after so many seconds; null = never."""

    version: int
    manifest: dict[str, Any]
    within_s: Annotated[float, msgspec.Meta(gt=0)] | None = None


class VersionBody(msgspec.Struct, frozen=True):
    version: int


class _EventBody(msgspec.Struct, frozen=True):
    """What one event may hold: a chunk, or `error` alone."""

    token_ids: tuple[_Int32, ...] | None = None
    logprobs: tuple[float | None, ...] = ()
    weight_versions: tuple[_Int32, ...] = ()
    kept_mass: tuple[float, ...] = ()
    finish_reason: FinishReason | None = None
    top: _Candidates = ()
    constrained: tuple[bool, ...] = ()
    error: ErrorDetail | None = None


_requests = msgspec.json.Decoder(GenerateBody)
_events = msgspec.json.Decoder(_EventBody)
_errors = msgspec.json.Decoder(ErrorBody)
_health = msgspec.json.Decoder(HealthBody)
_loads = msgspec.json.Decoder(LoadWeightsBody)
_encoder = msgspec.json.Encoder()
_REFUSED: dict[str, WeightsArrow] = {f"weights_{arrow}": arrow for arrow in get_args(WeightsArrow)}


def encode_request(request: GenerateRequest) -> bytes:
    """The body of a generate call. Raises ValueError if max_tokens or temperature is None: the proxy fills them."""
    sampling = request.sampling
    if sampling.max_tokens is None or sampling.temperature is None:
        raise ValueError(
            f"request {request.request_id}: max_tokens and temperature must be set before a backend is asked"
        )
    return _encoder.encode(
        GenerateBody(
            request_id=request.request_id,
            session_id=request.session_id,
            token_ids=request.prompt_ids.tolist(),
            sampling_params=SamplingBody(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=1.0 if sampling.top_p is None else sampling.top_p,
                top_k=sampling.top_k or 0,
                seed=request.rng_seed,
                stop_token_ids=sampling.stop_token_ids,
                logprobs=sampling.top_logprobs,
                structured_outputs=StructuredOutputs(request.grammar) if request.grammar else None,
            ),
        )
    )


def decode_request(body: bytes) -> GenerateRequest:
    """The request a server has to answer. Raises BadRequest naming the field that is wrong."""
    try:
        said = _requests.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"not a generate request: {error}") from error
    if not said.stream:
        raise BadRequest("this server streams only; send stream: true", param="stream")
    if not said.token_ids:
        raise BadRequest("token_ids is empty; a prompt has at least one token", param="token_ids")
    wanted = said.sampling_params
    if wanted.max_tokens < 1:
        raise BadRequest(f"max_tokens is {wanted.max_tokens}; ask for at least 1", param="max_tokens")
    try:
        prompt_ids = np.array(said.token_ids, dtype=np.int32)
    except OverflowError as error:
        raise BadRequest(f"token_ids holds a number that is no token id: {error}", param="token_ids") from error
    return GenerateRequest(
        request_id=said.request_id,
        session_id=said.session_id,
        prompt_ids=prompt_ids,
        sampling=SamplingParams(
            max_tokens=wanted.max_tokens,
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            top_k=wanted.top_k,
            seed=wanted.seed,
            stop_token_ids=wanted.stop_token_ids,
            top_logprobs=wanted.logprobs,
        ),
        rng_seed=wanted.seed,
        grammar=wanted.structured_outputs.grammar if wanted.structured_outputs else "",
    )


def encode_chunk(chunk: TokenChunk) -> bytes:
    """One Server-Sent Event; after the last one goes web.sse.DONE_EVENT."""
    top = tuple(tuple((token, value if math.isfinite(value) else None) for token, value in row) for row in chunk.top)
    body = ChunkBody(
        token_ids=chunk.token_ids,
        logprobs=tuple(value if math.isfinite(value) else None for value in chunk.logprobs),
        weight_versions=chunk.versions,
        kept_mass=chunk.kept_mass,
        finish_reason=chunk.finish_reason,
        top=top,
        constrained=chunk.constrained or (),
    )
    return encode_event(_encoder.encode(body))


def decode_chunk(data: str | bytes) -> TokenChunk:
    """The chunk in one event's data. Raises the server's own error, or BackendError if the event makes no sense."""
    try:
        said = _events.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BackendError(f"the inference server sent an event that is no chunk: {error}") from error
    if said.error is not None:
        raise to_exception(200, said.error)
    if said.token_ids is None:  # text alone cannot be recorded as it was sampled (T054)
        raise BackendError("the inference server sent an event without token_ids; make it send the ids that it sampled")
    count = len(said.token_ids)
    logprobs = said.logprobs if len(said.logprobs) == count else (None,) * count
    return TokenChunk(
        token_ids=said.token_ids,
        logprobs=tuple([math.nan if value is None else value for value in logprobs]),
        versions=said.weight_versions if len(said.weight_versions) == count else (-1,) * count,
        kept_mass=said.kept_mass if len(said.kept_mass) == count else (1.0,) * count,
        top=_candidates(said.top) if said.top and len(said.top) == count else (),
        finish_reason=said.finish_reason,
        constrained=said.constrained if len(said.constrained) == count > 0 else None,
    )


def _candidates(top: _Candidates) -> tuple[tuple[tuple[int, float], ...], ...]:
    return tuple(tuple((token, -math.inf if value is None else value) for token, value in row) for row in top)


def encode_error(error: ArealError) -> bytes:
    """The JSON body of a failure; as an event after the first chunk, `b"data: " + encode_error(e) + b"\\n\\n"`."""
    detail = ErrorDetail(
        message=str(error),
        code=error.code or error.type,
        tokens=error.tokens if isinstance(error, ContextOverflow) else 0,
        maximum=error.maximum if isinstance(error, ContextOverflow) else 0,
    )
    return _encoder.encode(ErrorBody(detail))


def decode_error(status: int, body: bytes) -> ArealError:
    """The exception that a status other than 200 stands for, whatever its body is."""
    try:
        detail = _errors.decode(body).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        detail = ErrorDetail(message=body[:300].decode("utf-8", "replace") or "(no body)")
    return to_exception(status, detail)


def to_exception(status: int, detail: ErrorDetail) -> ArealError:
    """A type per remedy: what the client asked wrongly is a BadRequest, all else is the backend's. 200: in mid-stream."""
    if detail.code == CONTEXT_OVERFLOW:
        return ContextOverflow(detail.tokens, detail.maximum)
    if status == 400:
        return BadRequest(detail.message, code=detail.code)
    if detail.code == BackendTimeout.code:
        return BackendTimeout(detail.message)
    if detail.code in _REFUSED:
        return WeightsRefused(_REFUSED[detail.code], detail.message)
    if status == 401:
        return BackendError("the inference server refused the run token; was it started by another run?")
    if status == 404:
        return NotFound(detail.message)
    how = "failed in mid-stream" if status == 200 else f"answered {status}"
    error = BackendError(f"the inference server {how}: {detail.message}")
    if status >= 400:  # a failure before the first token keeps its status all the way to the client (settled 13, T106)
        error.status = status
        error.should_retry = status >= 500 or status in (408, 429)
        error.retry_after_s = RETRY_AFTER_S if status in (429, Unavailable.status) else None
    return error


def encode_health(health: BackendHealth) -> bytes:
    return _encoder.encode(
        HealthBody(
            protocol=PROTOCOL,
            model=health.model,
            version=health.version,
            max_context=health.max_context,
            running=health.running,
            waiting=health.waiting,
            kv_tokens_free=health.kv_tokens_free,
        )
    )


def decode_health(body: bytes) -> BackendHealth:
    """Raises BackendError when the server speaks another protocol."""
    try:
        said = _health.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BackendError(f"this is no inference server, its /health makes no sense: {error}") from error
    if said.protocol != PROTOCOL:
        raise BackendError(
            f"the inference server speaks protocol {said.protocol}, this process {PROTOCOL}; run one version of areal"
        )
    return BackendHealth(
        model=said.model,
        version=said.version,
        max_context=said.max_context,
        running=said.running,
        waiting=said.waiting,
        kv_tokens_free=said.kv_tokens_free,
    )


def encode_load_weights(manifest: dict[str, Any], version: int, within_s: float | None = None) -> bytes:
    return _encoder.encode(LoadWeightsBody(version=version, manifest=manifest, within_s=within_s))


def decode_load_weights(body: bytes) -> LoadWeightsBody:
    """Raises BadRequest."""
    try:
        return _loads.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"not a load_weights request: {error}") from error


def encode_version(version: int) -> bytes:
    return _encoder.encode(VersionBody(version))


def decode_version(body: bytes) -> int:
    """Raises BackendError."""
    try:
        return msgspec.json.decode(body, type=VersionBody).version
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BackendError(f"load_weights answered something that is no version: {error}") from error
