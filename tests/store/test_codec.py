"""Rows give back exactly what was recorded, also rows of an earlier release."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from areal.base.types import Completion, Interaction, Message, SamplingParams, Tool, ToolCall
from areal.store.codec import FACTS, RECORDING, decode, encode

ids = hnp.arrays(np.int32, 4)
floats = hnp.arrays(np.float32, 4)  # NaN and infinities included: what a backend said is kept as it is
text = st.text(max_size=20)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
messages = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=text,
    reasoning=text,
    tool_calls=st.lists(st.builds(ToolCall, id=text, name=text, arguments=text), max_size=2).map(tuple),
    tool_call_id=text,
    name=text,
)
interactions = st.builds(
    Interaction,
    id=text,
    session_id=text,
    index=st.integers(0, 99),
    prompt_ids=ids,
    completion=st.builds(
        Completion,
        token_ids=ids,
        logprobs=floats,
        versions=ids,
        kept_mass=floats,
        temperature=st.floats(0, 2),
        finish_reason=st.sampled_from(["stop", "length", "tool_calls", "abort", "error"]),
        constrained=st.none() | hnp.arrays(np.bool_, 4),
    ),
    messages=st.lists(messages, max_size=3).map(tuple),
    reply=messages,
    tools=st.lists(st.builds(Tool, name=text, parameters=st.dictionaries(text, json_values, max_size=3))).map(tuple),
    sampling=st.builds(SamplingParams, temperature=st.none() | st.floats(0, 2), stop=st.lists(text).map(tuple)),
    tags=st.lists(st.sampled_from(["superseded", "greedy"]), max_size=2).map(tuple),
    reward=st.none() | st.floats(-5, 5),
    token_parent=st.none() | text,
)


def arrays(one: Interaction) -> list[bytes | None]:
    done = one.completion
    kept = [one.prompt_ids, done.token_ids, done.logprobs, done.versions, done.kept_mass, done.constrained]
    return [None if array is None else array.dtype.str.encode() + array.tobytes() for array in kept]


def texts(one: Interaction) -> dict[str, object]:
    plain = {name: getattr(one, name) for name in Interaction.__slots__ if name not in ("prompt_ids", "completion")}
    return plain | {"temperature": one.completion.temperature, "finish_reason": one.completion.finish_reason}


@given(interactions)
def test_decode_inverts_encode(given_one: Interaction) -> None:
    facts, recording = encode(given_one)
    assert (tuple(facts), tuple(recording)) == (FACTS, RECORDING)
    kept = decode({**facts, **recording}, given_one.session_id)
    assert arrays(kept) == arrays(given_one)
    assert texts(kept) == texts(given_one)


@given(hnp.arrays(np.int32, st.integers(0, 5)))
def test_arrays_are_little_endian_bytes(values: np.ndarray) -> None:
    naive = b"".join(int(value).to_bytes(4, "little", signed=True) for value in values)
    blank = Interaction("i", "s", 0, values, _completion(), (), Message("assistant"))
    assert encode(blank)[1]["prompt_ids"] == naive


def test_a_row_of_an_earlier_or_later_release_is_readable() -> None:
    """A field that this release lacks is skipped, one that the row lacks takes its default."""
    facts, recording = encode(Interaction("i", "s", 0, np.zeros(1, np.int32), _completion(), (), Message("user", "hi")))
    recording["reply"] = json.dumps({"role": "assistant", "content": "x", "mood": "of a later release"})
    recording["sampling"] = "{}"
    kept = decode({**facts, **recording}, "s")
    assert (kept.reply, kept.sampling) == (Message("assistant", "x"), SamplingParams())


def test_recorded_arrays_cannot_be_changed_by_a_reader() -> None:
    facts, recording = encode(Interaction("i", "s", 0, np.zeros(1, np.int32), _completion(), (), Message("user")))
    assert not decode({**facts, **recording}, "s").prompt_ids.flags.writeable


def _completion() -> Completion:
    one = np.zeros(1, np.float32)
    return Completion(np.zeros(1, np.int32), one, np.zeros(1, np.int32), one, 1.0, "stop")
