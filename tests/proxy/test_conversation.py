"""Which recorded turn does a call continue? On hand-made sessions, without a service."""

from __future__ import annotations

import numpy as np

from areal.base.types import Completion, Interaction, Message, ModelCall, Tag, Tool, ToolCall
from areal.proxy.conversation import Conversation

ASKED = Message("user", "weather in Oslo and Rome?")
CALLS = Message(
    "assistant",
    tool_calls=(ToolCall("call_1", "get", '{"city":"Oslo"}'), ToolCall("call_2", "get", '{"city": "Rome"}')),
)
OSLO, ROME = Message("tool", "cold", tool_call_id="call_1"), Message("tool", "warm", tool_call_id="call_2")
TOOLS = (Tool("get"),)


def turn(
    index: int,
    messages: tuple[Message, ...],
    reply: Message,
    tools: tuple[Tool, ...] = TOOLS,
    tags: tuple[Tag, ...] = (),
) -> Interaction:
    none = np.zeros(0, np.float32)
    completion = Completion(none.astype(np.int32), none, none.astype(np.int32), none, 1.0, "stop")
    ids = np.array([index], np.int32)
    return Interaction(f"i{index}", "s", index, ids, completion, messages, reply, tools, tags=tags)


def found(talk: Conversation, *messages: Message, tools: tuple[Tool, ...] = TOOLS) -> list[str]:
    return [one.id for one in talk.continued_by(ModelCall(messages, tools))]


def why(talk: Conversation, call: ModelCall) -> str:
    divergence = talk.divergence(call, talk.continued_by(call))
    return "" if divergence is None else divergence.reason


def test_parallel_results_may_come_back_in_any_order_and_arguments_in_any_print() -> None:
    answer = Message("assistant", "cold and warm")
    talk = Conversation([turn(0, (ASKED,), CALLS), turn(1, (ASKED, CALLS, OSLO, ROME), answer)])
    echoed = Message(
        "assistant",
        tool_calls=(ToolCall("call1", "get", '{ "city": "Oslo" }'), ToolCall("call2", "get", '{"city":"Rome"}')),
    )
    assert found(talk, ASKED, echoed, ROME, OSLO) == ["i0"]
    assert found(talk, ASKED, echoed, ROME, OSLO, answer, Message("user", "thanks")) == ["i1"]


def test_the_longest_prefix_wins_and_a_call_without_news_continues_nothing() -> None:
    talk = Conversation([turn(0, (ASKED,), CALLS), turn(1, (ASKED, CALLS, OSLO, ROME), Message("assistant", "ok"))])
    assert found(talk, ASKED, CALLS) == []  # nothing new follows the reply
    assert found(talk, ASKED) == []
    assert found(talk, ASKED, CALLS, OSLO) == ["i0"]
    assert found(talk, ASKED, CALLS, OSLO, ROME, Message("assistant", "edited"), Message("user", "x")) == ["i0"]


def test_each_call_is_looked_up_by_its_own_messages() -> None:
    talk = Conversation([turn(0, (ASKED,), CALLS)])
    goes_on, begins = ModelCall((ASKED, CALLS, OSLO), TOOLS), ModelCall((Message("user", "other"),), TOOLS)
    for call, expected in ((goes_on, ["i0"]), (begins, []), (goes_on, ["i0"])):
        assert [one.id for one in talk.continued_by(call)] == expected
    again = ModelCall((ASKED,), TOOLS)
    assert why(talk, again) == "resampled"
    assert why(talk, begins) != "resampled"


def test_equal_answers_steps_first_then_the_newest() -> None:
    reply = Message("assistant", "ok")
    tags: list[tuple[Tag, ...]] = [(), (), ("superseded",)]
    talk = Conversation([turn(k, (ASKED,), reply, tags=tags[k]) for k in range(3)])
    assert found(talk, ASKED, reply, Message("user", "x")) == ["i1", "i0", "i2"]
    talk.retag("i1", "aborted")
    assert found(talk, ASKED, reply, Message("user", "x")) == ["i0", "i2", "i1"]


def test_other_tools_are_another_conversation_and_the_reason_says_so() -> None:
    talk = Conversation([turn(0, (ASKED,), Message("assistant", "ok"))])
    more = (ASKED, Message("assistant", "ok"), Message("user", "x"))
    assert found(talk, *more, tools=()) == []
    assert why(talk, ModelCall(more, ())) == "tools_changed"
    assert why(talk, ModelCall((ASKED, Message("user", "y")), TOOLS)) == "turns_dropped"
    assert why(talk, ModelCall((Message("user", "new"),), TOOLS)) == "new_conversation"
    assert why(talk, ModelCall((ASKED,), TOOLS)) == "resampled"
    assert why(Conversation(), ModelCall((ASKED,), TOOLS)) == ""


def test_undelivered_answers_are_superseded_by_any_same_call_delivered_ones_only_by_a_marked_retry() -> None:
    talk = Conversation([turn(k, (ASKED,), Message("assistant", str(k))) for k in range(3)])
    again, retry = ModelCall((ASKED,), TOOLS), ModelCall((ASKED,), TOOLS, retry_count=1)
    assert talk.superseded_by(again) == []
    assert [one.id for one in talk.superseded_by(retry)] == ["i2"]
    talk.retag("i0", "undelivered")
    assert [one.id for one in talk.superseded_by(again)] == ["i0"]
    talk.retag("i0", "superseded")
    assert talk.superseded_by(again) == []


def test_a_history_is_kept_once_however_often_it_is_sent() -> None:
    def long() -> Message:
        return Message("user", "x" * 1000 + str(1))

    talk = Conversation([turn(k, (long(),), Message("assistant", str(k))) for k in range(3)])
    kept = [talk.continued_by(ModelCall((long(), Message("assistant", str(k)), ASKED), TOOLS))[0] for k in range(3)]
    assert kept[0].messages[0] is kept[1].messages[0] is kept[2].messages[0]
