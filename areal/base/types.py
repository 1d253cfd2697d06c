"""The nouns that cross folders, all frozen. JSON is decoded to these at the edge, once, and never travels further in.

    call = ModelCall(messages=(Message("user", "2+2?"),), sampling=SamplingParams(max_tokens=8))
    completion = Completion(token_ids=ids, logprobs=logprobs, versions=versions, finish_reason="stop")

Token arrays are one-dimensional numpy arrays (int32 ids and versions, float32 log-probs, bool masks), never lists; but for
TokenChunk, of which there is one per token: there numpy and dataclasses would take ten times as long as tuples in a Struct.
No torch, no I/O. The only tensor noun, PackedBatch, lives in engine/batch.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

Role = Literal["system", "user", "assistant", "tool"]
Purpose = Literal["train", "eval"]
ExportStyle = Literal["individual", "concat"]
FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]
Ending = Literal["ended", "refreshed", "expired", "reward_failed", "excluded"]  # how a session came to its end

# Why an interaction is not trained although it was recorded; each is counted (`masked(reason)`).
Tag = Literal[
    "side_request", "superseded", "aborted", "untrainable", "greedy", "constrained", "scripted_history", "undelivered"
]

# Why an interaction starts a training row of its own although its session has recorded others. The first line: it is a conversation
# or a sample of its own, no row was there to go on from. The rest: it leaves a recorded row behind. Meanings: docs/http.md.
BranchReason = Literal[
    "new_conversation", "sub_agent", "side_request", "choice", "resampled", "retried", "parallel",
    "system_changed", "tools_changed", "history_changed", "answer_changed", "fabricated_turn", "context_moved", "turns_dropped",
    "compacted", "reasoning_stripped", "template_rewrites", "template_arguments", "not_reproducible",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool. `arguments` is the JSON text exactly as sampled or sent; templates get it decoded."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation in canonical form: text parts joined, absent = empty, `developer` = `system`.

    instructions: given with one call and for that call alone, so a call that names this one as its previous answer does
    not inherit it (Responses API); it makes no difference to what the turn says.
    """

    role: Role
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    instructions: bool = False


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call. `parameters` is its JSON schema."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer must be, apart from its reasoning: JSON of `schema`, or calls of tools, or either where both are set.

    schema: None = no JSON answer. calls: None = no calls, () = calls of any of the call's tools, else of those named.
    parallel: several calls are allowed. lenient: what no grammar can express of `schema` is left out, not refused.
    """

    schema: Mapping[str, Any] | None = None
    calls: tuple[str, ...] | None = None
    parallel: bool = True
    lenient: bool = False


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. None = the client named nothing, the policy's default (`gconfig`) applies.

    temperature 0 means greedy. top_k 0 and top_p 1 mean off. `stop` texts are matched in the proxy, not in the
    backend; `stop_token_ids` end a completion in the backend and stay in its ids. constraint: what the answer must be;
    None leaves it free.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    top_logprobs: int = 0
    want_logprobs: bool = False
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class ModelCall:
    """What a client asked for, in whichever dialect it spoke.

    previous: the id of the answer whose conversation `messages` go on from; empty where they are the whole of it.
    inherits_tools: with `previous`, that answer's tools are this call's.
    echo: fields of the request that its protocol's answer repeats; read by that dialect alone.
    background: the client's own housekeeping (a title), none of its agent's turns.
    size: bytes of the request, 0 where nobody counted; what is long is worked on beside the event loop.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    sampling: SamplingParams = SamplingParams()
    stream: bool = False
    model: str = "default"
    n: int = 1
    include_usage: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    retry_count: int = 0  # x-stainless-retry-count: the SDK is sending the same call again
    agent: str = ""  # which of several agents in one session is calling, where the client says so
    previous: str = ""
    inherits_tools: bool = False
    echo: Mapping[str, Any] = field(default_factory=dict)
    background: bool = False
    size: int = 0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """What the proxy asks of a backend: token ids in. `sampling` has no None left in it (see proxy/recorder).

    rng_seed fixes the sampled tokens together with the position: the draw for output token t depends on
    (rng_seed, t) alone, not on what else is in the batch (settled 17). session_id gives affinity and prefix reuse.
    grammar: what masks the sampling (chat/grammar.py), empty for an answer that is free.
    """

    request_id: str
    session_id: str
    prompt_ids: IntArray
    sampling: SamplingParams
    rng_seed: int
    grammar: str = ""


class TokenChunk(msgspec.Struct, frozen=True):
    """One or more tokens as they were sampled: four tuples of one length [n], then the reason if it was the last.

    logprobs: natural log, at the request's temperature, full vocabulary, as sampled. versions: the weight version
    that sampled each token. kept_mass: probability mass kept by top-p/top-k (1 = everything). top: per token the best
    candidates as (token id, logprob), empty unless asked for.
    constrained: True where a grammar took probability away from this token's choice; logprob is then that under the mask. None: no
    grammar was applied.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    kept_mass: tuple[float, ...]
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    finish_reason: FinishReason | None = None
    constrained: tuple[bool, ...] | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """What a backend sampled for one call: arrays of one length [n] (see TokenChunk for their meaning)."""

    token_ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    kept_mass: FloatArray
    temperature: float
    finish_reason: FinishReason
    constrained: BoolArray | None = None


@dataclass(frozen=True, slots=True)
class Fork:
    """Where an interaction's prompt leaves what its session has recorded, and why it does.

    detail: the reason in words. against: the interaction whose prompt and output it is compared with. position: the first prompt
    token that is another one. before, recorded, requested: decoded tokens, the last ones in common, and from there on what
    was recorded and what this prompt has (empty: it ends there).
    """

    reason: BranchReason
    detail: str = ""
    against: str = ""
    position: int = 0
    before: str = ""
    recorded: str = ""
    requested: str = ""


@dataclass(frozen=True, slots=True)
class Interaction:
    """One finished call inside a session, as the store keeps it.

    token_parent: the interaction whose prompt+output ids this prompt extends. credit_parent: the one whose messages
    this conversation continues (settled 5). index: start order within the session, from 0.
    """

    id: str
    session_id: str
    index: int
    prompt_ids: IntArray
    completion: Completion
    messages: tuple[Message, ...]
    reply: Message
    tools: tuple[Tool, ...] = ()
    sampling: SamplingParams = SamplingParams()
    model: str = "default"
    token_parent: str | None = None
    credit_parent: str | None = None
    fork: Fork | None = None  # None: the session's first, or it goes on from recorded tokens
    reward: float | None = None
    tags: tuple[Tag, ...] = ()
    started_at: float = 0.0  # seconds since the epoch
    finished_at: float = 0.0
    request_id: str = ""  # x-request-id of the HTTP call, the same in the gateway's log and in the answer's headers

    @property
    def branch_reason(self) -> BranchReason | Literal[""]:
        return self.fork.reason if self.fork else ""


@dataclass(frozen=True, slots=True)
class Span:
    """One interaction's output inside a Trajectory row: token_ids[start:end] were sampled by it."""

    interaction_id: str
    start: int
    end: int
    raw_reward: float | None
    reward: float  # discounted over the turns that follow: R_i = r_i + turn_discount * R_next
    trained: bool  # False: masked, see the interaction's tags
    truncated: bool = False  # cut off by a length limit: no end was sampled


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One training row: arrays of one length [n] over prompt and outputs.

    trained: True at the sampled tokens to train. logprobs 0 and versions -1 where not sampled. temperatures: of each
    sampled token, 1 elsewhere. The row is a pure function of the stored interactions (settled 9).
    """

    task_id: str
    session_id: str
    token_ids: IntArray
    trained: BoolArray
    logprobs: FloatArray
    versions: IntArray
    temperatures: FloatArray
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Sessions of one task id that are compared with each other. Rows of one session stay together."""

    id: str
    task_id: str
    trajectories: tuple[Trajectory, ...]

    def sessions(self) -> tuple[str, ...]:
        """Session ids in start order, each once."""
        return tuple(dict.fromkeys(row.session_id for row in self.trajectories))


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """What start_session asks for. key_hash: of the session key, the key itself is never stored."""

    task_id: str
    key_hash: str
    worker: str  # logical worker id
    purpose: Purpose = "train"
    tags: Mapping[str, str] = field(default_factory=dict)
    request_id: str | None = None  # same id again -> the same session again


@dataclass(frozen=True, slots=True)
class Session:
    """A session as the store keeps it. ending None: it runs. sample: its place in its group, 0 .. n_samples-1.
    attempt: its place among the tries of its task, counted on over groups that were not dropped; keys the sampler.
    excluded_because: what was said when it was excluded. deleted_at: when its content was deleted; its sums stay.
    request_id: under which it was started, if under one. awaits_reward_since: when it ended well in a run whose reward source had not
    rewarded it yet; None once it has, or where nobody will."""

    id: str
    task_id: str
    group_id: str
    sample: int
    key_hash: str
    worker: str
    purpose: Purpose
    tags: Mapping[str, str]
    started_at: float
    last_active_at: float
    ending: Ending | None = None
    ended_at: float | None = None
    interaction_count: int = 0
    attempt: int = 0
    excluded_because: str = ""
    deleted_at: float | None = None
    request_id: str | None = None
    awaits_reward_since: float | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What the controller publishes for admission. Units: groups, except n_samples (sessions per group).

    scored: a session that ends well and has no reward waits for the run's reward source. held: why no group may open now, a
    clause that ends with the remedy; empty where they may."""

    max_concurrent: int
    max_lag: int
    batch_groups: int
    n_samples: int = 1
    queue_size: int = 0  # most groups accepted and not yet trained; 0 = (max_lag + 1) * batch_groups alone decides
    accepting: bool = True  # False: draining, new sessions get 503
    group_timeout_s: float = 3600.0  # a group not filled by then goes on with >= 2 survivors or is dropped
    scored: bool = False
    held: str = ""


@dataclass(frozen=True, slots=True)
class Version:
    """A published set of weights. label is never reused; lag is a difference of steps (settled 4)."""

    label: int
    step: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class Counts:
    """Derived from store rows. Groups unless said otherwise."""

    running: int
    accepted: int  # ended, not yet consumed or dropped
    consumed: int
    dropped: Mapping[str, int]  # by reason
    running_sessions: int
    free_slots: int
    recorded_tokens: int
    trained_tokens: int
    masked_tokens: int
    dropped_tokens: int
    awaiting_reward: int = 0  # training sessions that have ended and wait for the run's reward source


@dataclass(frozen=True, slots=True)
class Share:
    """A part of what a session recorded: sampled tokens, and the interactions that are counted there (store/balance.py)."""

    tokens: int
    interactions: int


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A row of the worker registry: where a logical worker lives now."""

    id: str
    url: str
    pid: int
    host: str
    heartbeat_at: float
    running_sessions: int = 0
