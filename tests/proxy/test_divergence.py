"""Every way in which a call can leave what was recorded has its name, and the tokens on both sides, decoded."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from areal.base.types import BranchReason, Completion, Interaction, Message, ModelCall, Tool, ToolCall
from areal.inference.scripted.vocabulary import Vocabulary
from areal.proxy.conversation import Conversation
from areal.proxy.divergence import SHOWN_TOKENS, Divergence, describe, diverge

SUMMARY = "The user wants the sum of all numbers below one hundred; so far 4950 was found and checked twice."
S, U1, A1, U2, A2, U3 = (
    Message("system", "Be terse. Today is Monday."),
    Message("user", "find the sum"),
    Message("assistant", "", tool_calls=(ToolCall("c1", "add", '{"a": 1}'),)),
    Message("tool", "4950", tool_call_id="c1"),
    Message("assistant", "It is 4950."),
    Message("user", "sure?"),
)
CONTEXT = Message("user", "<internal context: 3 files open>")
TOOLS = (Tool("add"),)


def recorded(*messages: Message, reply: Message = A2, tools: tuple[Tool, ...] = TOOLS, index: int = 0) -> Interaction:
    ids = np.arange(3, dtype=np.int32) + index
    completion = Completion(ids, ids.astype(np.float32), ids, ids.astype(np.float32), 1.0, "stop")
    return Interaction(f"i{index}", "s", index, ids, completion, messages, reply, tools)


WHOLE = recorded(S, U1, A1, U2)  # and A2, the reply
EDITED = Message("user", "find the product")
OTHER_ANSWER = Message("assistant", "Calling tools: add")
CASES: list[tuple[str, Interaction, ModelCall, str]] = [
    ("system_changed", WHOLE, ModelCall((Message("system", "Be terse. Today is Tuesday."), U1, A1, U2, A2, U3), TOOLS),
     "message 0 (system) differs from character 19 on"),
    ("system_changed", WHOLE, ModelCall((U1, A1, U2, A2, U3), TOOLS), "message 0 (system)"),
    ("tools_changed", WHOLE, ModelCall((S, U1, A1, U2, A2, U3)), "the list of tools"),
    ("history_changed", WHOLE, ModelCall((S, EDITED, A1, U2, A2, U3), TOOLS), "message 1 (user) differs from character 9"),
    ("history_changed", WHOLE, ModelCall((S, U1, CONTEXT, A1, U2, A2, U3), TOOLS), "message 2 (user) was put between"),
    ("history_changed", WHOLE, ModelCall((S, U1, A1), TOOLS), "it ends before message 3 (tool)"),
    ("answer_changed", WHOLE, ModelCall((S, U1, OTHER_ANSWER, CONTEXT), TOOLS), "message 2 (assistant) differs"),
    ("answer_changed", WHOLE, ModelCall((S, U1, Message("assistant", "", tool_calls=(ToolCall("c1", "invalid", "{}"),)), U2),
     TOOLS), "message 2 (assistant) has other tool calls"),
    ("fabricated_turn", WHOLE, ModelCall((S, U1, A1, Message("assistant", "I never said so."), U2, A2, U3), TOOLS),
     "message 3 (assistant) was put between"),
    ("fabricated_turn", recorded(S, U1, CONTEXT, reply=A1), ModelCall((S, U1, Message("assistant", "Hello!"), EDITED), TOOLS), "message 2 (assistant)"),
    ("context_moved", recorded(S, U1, CONTEXT, reply=A1), ModelCall((S, U1, A1, U2, CONTEXT), TOOLS), "message 2 (user)"),
    ("context_moved", recorded(S, U1, CONTEXT, reply=A1), ModelCall((S, U1, A1, U2, U3), TOOLS), "message 2 (user)"),
    ("turns_dropped", WHOLE, ModelCall((S, U1, A2, U3), TOOLS), "messages 2 to 3 of the recorded conversation are left out"),
    ("turns_dropped", recorded(S, U1), ModelCall((S, U1, U3), TOOLS), "message 2 (assistant) of the recorded conversation"),
    ("compacted", WHOLE, ModelCall((S, Message("user", "What happened before: a sum."), A2, U3), TOOLS), "messages 1 to 3"),
    ("compacted", recorded(S, U1, reply=Message("assistant", f"<summary>\n{SUMMARY}\n</summary>")),
     ModelCall((S, Message("user", f"This session is being continued.\n\n{SUMMARY}\nGo on.")), TOOLS), "comes back inside"),
    ("new_conversation", WHOLE, ModelCall((Message("system", "You write titles."), Message("user", "a title?"))), "nothing"),
    ("sub_agent", WHOLE, ModelCall((Message("system", "You are a helper."), Message("user", "look")), TOOLS, agent="a7"), "a7"),
    ("parallel", WHOLE, ModelCall((S, U1, A1, U2, A2, U3), TOOLS), "at the same time"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "one", "call", "detail"), CASES, ids=[f"{k}-{case[0]}" for k, case in enumerate(CASES)]
)
def test_every_parting_has_its_name(reason: str, one: Interaction, call: ModelCall, detail: str) -> None:
    found = diverge(call, [one])
    assert (found.reason, found.against.id) == (reason, one.id)
    assert detail in found.detail


def test_no_name_is_without_a_case() -> None:
    by_conversation = {"side_request", "choice", "resampled", "retried"}  # below, and in test_recording.py
    by_template = {
        "reasoning_stripped",
        "template_rewrites",
        "template_arguments",
        "not_reproducible",
    }  # test_renderer.py
    assert {case[0] for case in CASES} | by_conversation | by_template == set(get_args(BranchReason))


def test_the_nearest_of_several_conversations_is_compared() -> None:
    ends = [recorded(Message("user", "other"), index=0), recorded(S, U1, A1, U2, index=1), recorded(S, U1, index=2)]
    assert diverge(ModelCall((S, U1, A1, U2, OTHER_ANSWER, U3), TOOLS), ends).against.id == "i1"
    assert diverge(ModelCall((Message("user", "other"), U3), ()), ends).against.id == "i0"


def test_the_first_differing_token_is_decoded_on_both_sides() -> None:
    words = Vocabulary({}, [])
    row, sent = "user: Monday is fine.", "user: Monday is bad."
    ids = np.array(words.encode(row), np.int32)
    one = recorded(U1)
    one = Interaction("i", "s", 0, ids[:12], Completion(ids[12:], ids[12:], ids[12:], ids[12:], 1.0, "stop"), (U1,), A2)
    fork = describe(Divergence("history_changed", "so", one), np.array(words.encode(sent), np.int32), words)
    assert (fork.position, fork.against, fork.detail) == (16, "i", "so")
    assert (fork.before, fork.recorded, fork.requested) == ("user: Monday is ", "fine.", "bad.")
    same = describe(Divergence("resampled", "", one), ids[:12], words)
    assert (same.position, same.recorded, same.requested) == (12, " is fine.", "")
    long = np.concatenate([ids, np.full(500, words.encode("x")[0], np.int32)])
    assert describe(Divergence("parallel", "", one), long, words).requested == "x" * SHOWN_TOKENS


def test_a_call_that_goes_on_where_another_already_runs_starts_a_row() -> None:
    first = recorded(S, U1, reply=A1)
    talk = Conversation([first])
    call = ModelCall((S, U1, A1, U2), TOOLS)
    found = talk.continued_by(call)
    assert talk.divergence(call, found) is None
    with talk.going_on(found):
        second = talk.divergence(call, found)
        assert second is not None
        assert second.reason == "parallel"
    assert talk.divergence(call, found) is None  # the first call failed without a token: the row is free again


def test_another_model_name_is_a_side_request_only_where_it_begins_something() -> None:
    talk = Conversation([recorded(S, U1)])
    title = ModelCall((Message("user", "a title?"),), model="small")
    found = talk.divergence(title, [], side_request=True)
    assert found is not None
    assert (found.reason, found.detail) == ("side_request", "it asks for another model, 'small'")
