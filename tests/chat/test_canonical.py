"""When is a message that comes back the recorded one? What real clients were seen to do to it (clients.md, 27 to 33)."""

from __future__ import annotations

import numpy as np
import pytest

from areal.base.types import Completion, Interaction, Message, Tool, ToolCall
from areal.chat.canonical import continues, difference, message_key, ordered, tools_key


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
    (call('{"a": 1}'), call('{"a": 1}', call_id="call_9")),
    (call("{bad"), call('{"INVALID_JSON": "{bad"}')),  # pydantic-ai's rewriting
    (call("{}"), Message("assistant", "")),
    (Message("assistant", "4"), Message("assistant", "5")),
    (Message("assistant", "4"), Message("user", "4")),
    (Message("user", "4"), Message("user", " 4")),
    (Message("user", "4", name="bob"), Message("user", "4")),
    (Message("user", "<think>a</think>4"), Message("user", "4")),
    (Message("tool", "ok", tool_call_id="c1"), Message("tool", "ok", tool_call_id="c2")),
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
    assert ordered([question, calls, two, one, reply, two]) == [question, calls, one, two, reply, two]


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
