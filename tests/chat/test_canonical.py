"""When is a message that comes back the recorded one? What real clients were seen to do to it (clients.md, 27 to 33)."""

from __future__ import annotations

import numpy as np
import pytest

from areal.base.types import Completion, Interaction, Message, Tool, ToolCall
from areal.chat.canonical import continues, difference, message_key, placed, same_ids, tools_key


def recorded(*messages: Message, reply: Message) -> Interaction:
    none = np.zeros(0, dtype=np.int32)
    completion = Completion(none, none.astype(np.float32), none, none.astype(np.float32), 1.0, "stop")
    return Interaction("i", "s", 0, none, completion, messages, reply)


def call(arguments: str, call_id: str = "call_8e23", name: str = "f") -> Message:
    return Message("assistant", tool_calls=(ToolCall(call_id, name, arguments),))


SAME = [
    (call('{"b":2,"a":"é"}'), call('{"a": "\\u00e9", "b": 2}')),  # T055: printed anew
    (call('{"x": 1.0, "y": [1e2, 0.5]}'), call('{"x": 1, "y": [100, 0.5]}')),  # JavaScript's numbers
    (call('{"x": 1e999}'), call('{"x": 1e999}')),
    (call("{}"), call("{}", call_id="call8e23")),  # OpenClaw strips the underscore
    (call("{}"), call("{}", call_id="call_8e23_fc_resp1_5cf7")),  # or makes an id of its own (Responses)
    (call("{bad"), call("{bad")),
    (Message("assistant", "4", reasoning="add"), Message("assistant", "4")),  # reasoning dropped
    (Message("assistant", "4", reasoning="add\n"), Message("assistant", "4", reasoning="add")),  # or trimmed
    (Message("assistant", "<think>\nadd\n</think>\n\n4"), Message("assistant", "4")),  # or cut out of the text
    (Message("assistant", "add\n</think>\n\n4"), Message("assistant", "4")),  # its opening stood in the prompt
    (Message("assistant", " 4\n"), Message("assistant", "4")),
    (Message("tool", "ok", tool_call_id="c_1"), Message("tool", "ok", tool_call_id="c1", name="f")),
]
OTHER = [
    (call('{"a": 1}'), call('{"a": 2}')),
    (call('{"a": 1}'), call('{"a": 1.5}')),
    (call('{"a": 1}'), call('{"a": true}')),
    (call('{"a": 1}'), call('{"a": 1}', name="g")),
    (call("{bad"), call('{"INVALID_JSON": "{bad"}')),  # pydantic-ai's rewriting
    (call("{}"), Message("assistant", "")),
    (Message("assistant", "4"), Message("assistant", "5")),
    (Message("assistant", "4"), Message("user", "4")),
    (Message("user", "4"), Message("user", " 4")),
    (Message("user", "4", name="bob"), Message("user", "4")),
    (Message("user", "<think>a</think>4"), Message("user", "4")),
    (Message("tool", "ok"), Message("tool", "no")),
]


@pytest.mark.parametrize(("ours", "theirs"), SAME)
def test_the_same_turn(ours: Message, theirs: Message) -> None:
    assert message_key(ours) == message_key(theirs)
    question = Message("user", "?")
    assert continues(recorded(question, reply=ours), [question, theirs, question]) == 2


@pytest.mark.parametrize(("ours", "theirs"), OTHER)
def test_another_turn(ours: Message, theirs: Message) -> None:
    assert message_key(ours) != message_key(theirs)
    question = Message("user", "?")
    assert continues(recorded(question, reply=ours), [question, theirs, question]) is None


def test_parallel_tool_results_may_change_places() -> None:
    calls = Message("assistant", tool_calls=(ToolCall("c1", "f", "{}"), ToolCall("c2", "g", "{}")))
    one, two = Message("tool", "1", tool_call_id="c1"), Message("tool", "2", tool_call_id="c2")
    question, reply = Message("user", "?"), Message("assistant", "done")
    talk = recorded(question, calls, two, one, reply=reply)
    assert continues(talk, [question, calls, one, two, reply, question]) == 5
    turns = [message for message, _ in placed([question, calls, two, one, reply, two])]
    assert turns == [question, calls, one, two, reply, two]


def test_calls_are_known_by_their_place_whatever_their_ids() -> None:
    """OpenClaw on Responses makes ids of call and item ids, and results name them."""

    def talk(first: str, second: str, *results: str) -> list[Message]:
        calls = Message("assistant", tool_calls=(ToolCall(first, "f", "{}"), ToolCall(second, "f", "{}")))
        return [Message("user", "?"), calls, *(Message("tool", "ok", tool_call_id=one) for one in results)]

    def said(*messages: Message) -> list[bytes]:
        return [message_key(one) + place for one, place in placed(messages)]

    ours, reply = talk("a1", "b2"), Message("assistant", "done")
    results = [Message("tool", "1", tool_call_id="a1"), Message("tool", "2", tool_call_id="b2")]
    renamed = [Message("tool", "2", tool_call_id="x_b2"), Message("tool", "1", tool_call_id="x_a1")]
    swapped = [Message("tool", "1", tool_call_id="x_b2"), Message("tool", "2", tool_call_id="x_a1")]
    recorded_talk = recorded(*ours, *results, reply=reply)
    theirs = [*talk("x_a1", "x_b2"), *renamed, reply, Message("user", "more")]
    assert difference(recorded_talk, theirs) == ""
    assert not same_ids(recorded_talk, theirs)
    assert same_ids(recorded_talk, [*talk("a_1", "b_2"), *results, reply])
    assert "message 2 (tool)" in difference(recorded_talk, [*talk("x_a1", "x_b2"), *swapped, reply])
    assert said(*talk("a1", "b2", "b2", "a1"))[:2] == said(*ours)
    again = [*talk("c", "d"), *talk("c", "d")[1:], Message("tool", "1", tool_call_id="c")]  # an id that is used again
    assert said(*again)[-1].endswith(b"#0.0")
    late = [*talk("a", "b"), *talk("c", "d")[1:], Message("tool", "1", tool_call_id="b")]  # of the turn before
    assert said(*late)[-1].endswith(b"#1.1")
    stray = Message("tool", "1", tool_call_id="gone_1")
    assert said(*ours, stray)[2].endswith(b"gone1")


def test_the_reason_names_the_message() -> None:
    question, reply = Message("user", "?"), Message("assistant", "4")
    talk = recorded(Message("system", "a"), question, reply=reply)
    assert difference(talk, [Message("system", "a"), question, reply]) == ""
    assert difference(talk, [Message("system", "b"), question, reply]) == "message 0 (system) is not the recorded one"
    edited = [Message("system", "a"), question, Message("assistant", "5")]
    assert difference(talk, edited) == "the reply (assistant) is not the recorded one"
    assert difference(talk, [question]) == "1 messages came, 3 are recorded"


def test_tools_are_compared_by_what_they_say() -> None:
    one = Tool("f", "d", {"type": "object", "required": ["a"]})
    assert tools_key([one]) == tools_key([Tool("f", "d", {"required": ["a"], "type": "object"})])
    assert tools_key([one]) != tools_key([Tool("f", "other", one.parameters)])
    assert tools_key([one]) != tools_key([])
    assert tools_key([one, Tool("g")]) != tools_key([Tool("g"), one])
