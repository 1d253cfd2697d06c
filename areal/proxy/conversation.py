"""What one session has recorded so far, in memory, indexed so that a call finds the turn it continues.

    talk = Conversation(await store.sessions.interactions(session_id))
    found = talk.continued_by(call)          # interactions of the longest recorded prefix, best candidate first
    why = talk.divergence(call, found)       # None where it goes on from what is recorded, or is the first
    talk.add(interaction)

A prefix is a chain of hashes over the tools and the canonical messages (chat/canonical.py), so a lookup costs one pass over
the call's messages whatever the session's length. A cache of store rows, rebuilt from them at any time. Pure
state: no clock, no I/O, one owner (the event loop). Used by recorder.py and sessions.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from hashlib import blake2b

from areal.base.errors import NotFound
from areal.base.types import Interaction, Message, ModelCall, Tag, Tool
from areal.chat.canonical import message_key, placed, same_ids, tools_key
from areal.proxy.divergence import Divergence, diverge
from areal.proxy.export import NOT_A_STEP
from areal.proxy.policy_name import PolicyName

MOST_ENDS = 16  # recorded conversations that a call is compared with when it begins a branch, newest first


class UnknownAnswer(NotFound):
    """What a call wants to go on from is nothing that this session has recorded."""

    code = "previous_response_not_found"
    param = "previous_response_id"

    def __init__(self) -> None:
        super().__init__(
            "the answer that this call goes on from is none of this session; name one that is, or send the whole conversation"
        )


class Conversation:
    """The interactions of one session, in start order, and the way from messages to them."""

    def __init__(self, interactions: Iterable[Interaction] = ()) -> None:
        self._by_id: dict[str, Interaction] = {}
        # Every turn brings the whole history again: each text is kept once, and its key is worked out once.
        self._messages: dict[Message, tuple[Message, bytes]] = {}
        self._ends: dict[bytes, list[str]] = {}
        self._bodies: dict[bytes, list[str]] = {}
        self._replies: set[bytes] = set()
        self._continued: set[str] = set()  # interactions that another one goes on from
        self._extended: set[str] = set()  # interactions whose very tokens another one goes on from
        self._claimed: Counter[str] = Counter()  # the same of calls that still run
        self._calls: set[str] = set()  # ids of answers, whatever the number of their choices
        self._next_index = 0
        self._asked: tuple[ModelCall, list[bytes]] | None = None  # the newest call and its chain
        self.policy = PolicyName()
        self.size = 0  # bytes in memory, roughly
        for interaction in sorted(interactions, key=lambda one: one.index):
            self.add(interaction)

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Interaction]:
        """The interactions, in the order in which they were stored."""
        return iter(tuple(self._by_id.values()))

    def __contains__(self, interaction_id: object) -> bool:
        return interaction_id in self._by_id

    def reserve(self, count: int) -> int:
        """The index of the next call's first choice; start order is decided here."""
        first = self._next_index
        self._next_index += count
        return first

    def add(self, interaction: Interaction) -> None:
        """Remember a stored interaction."""
        self._asked = None  # a call that is answered is held here no longer
        messages = tuple(map(self._kept, interaction.messages))
        reply = self._kept(interaction.reply)
        self.size += (
            interaction.prompt_ids.nbytes + 16 * len(interaction.completion.token_ids) + 8 * len(messages) + 2000
        )
        interaction = replace(interaction, messages=messages, reply=reply)
        self._by_id[interaction.id] = interaction
        self._calls.add(interaction.id.partition("#")[0])
        self._replies.add(self._key(reply))
        if interaction.credit_parent is not None:
            self._continued.add(interaction.credit_parent)
        if interaction.token_parent is not None:
            self._extended.add(interaction.token_parent)
        self._next_index = max(self._next_index, interaction.index + 1)
        if "side_request" not in interaction.tags:
            self.policy.recorded(interaction.model, tools=bool(interaction.tools))
        chain = self._chain(interaction.tools, (*interaction.messages, interaction.reply))
        self._ends.setdefault(chain[-1], []).append(interaction.id)
        self._bodies.setdefault(_body(chain[-2], interaction.model), []).append(interaction.id)

    @property
    def calls(self) -> int:
        """How many model calls were recorded; an answer with several choices is one."""
        return len(self._calls)

    def belongs(self, call: ModelCall) -> int:
        """How surely a call belongs here that says nothing but its messages; 0: it is of another conversation.

        3: it continues an answer that nothing has continued yet, or asks again where no answer arrived. 2: it continues an
        answer. 1: the last answer in it is one of ours, though what stands before has changed."""
        found = self.continued_by(call)
        if self.superseded_by(call) or self._cut_off(call) or any(one.id not in self._continued for one in found):
            return 3
        if found or self.choices(call.previous):
            return 2
        last = next((one for one in reversed(call.messages) if one.role == "assistant"), None)
        return int(last is not None and self._key(last) in self._replies)

    def retag(self, interaction_id: str, tag: Tag) -> None:
        one = self._by_id[interaction_id]
        self._by_id[interaction_id] = replace(one, tags=(*one.tags, tag))

    def choices(self, call_id: str) -> list[str]:
        """The interaction ids of one answer: itself, or its choices `<id>#0`, `<id>#1`, ... (settled 15)."""
        if call_id in self._by_id:
            return [call_id]
        found: list[str] = []
        while (choice := f"{call_id}#{len(found)}") in self._by_id:
            found.append(choice)
        return found

    def continued_by(self, call: ModelCall) -> list[Interaction]:
        """Interactions whose messages and reply are the longest recorded prefix of this call's messages.

        Several when the same text was sampled twice: the one that the call names, those with its ids of tool calls, those
        that are steps, then the newest."""
        chain = self._asked_for(call)
        for key in reversed(chain[1:-1]):  # at least one new message follows the recorded reply
            ids = self._ends.get(key)
            if ids:
                return sorted((self._by_id[one] for one in ids), key=partial(_preference, call))
        return []

    def resolved(self, call: ModelCall) -> ModelCall:
        """The call with its whole conversation, where it names the answer it goes on from (`previous`).

        That answer's own instructions are not inherited. Raises NotFound, in the same words for an id that never was and for
        one of another session."""
        if not call.previous:
            return call
        named = self.choices(call.previous)
        if not named:
            raise UnknownAnswer
        one = self._by_id[named[0]]  # of several choices the first, which is what most clients look at
        own = [message for message in call.messages if message.instructions]
        new = [message for message in call.messages if not message.instructions]
        said = [message for message in one.messages if not message.instructions]
        tools = one.tools if call.inherits_tools else call.tools
        return replace(call, messages=(*own, *said, one.reply, *new), tools=tools, previous=one.id)

    def _repeats(self, call: ModelCall) -> list[Interaction]:
        """Earlier answers to the same messages, tools and model that are still steps, oldest first."""
        key = _body(self._asked_for(call)[-1], call.model)
        found = [self._by_id[one] for one in self._bodies.get(key, [])]
        return [one for one in found if NOT_A_STEP.isdisjoint(one.tags)]

    def superseded_by(self, call: ModelCall) -> list[Interaction]:
        """Answers that this call replaces (settled 12): all undelivered ones, and of a retry also the last one."""
        repeats = self._repeats(call)
        lost = {one.id for one in repeats if "undelivered" in one.tags}
        if call.retry_count and repeats:
            lost.update(self.choices(repeats[-1].id.partition("#")[0]))
        return [one for one in repeats if one.id in lost]

    def _cut_off(self, call: ModelCall) -> bool:
        """Whether the newest answer to this very body was aborted."""
        asked = self._bodies.get(_body(self._asked_for(call)[-1], call.model))
        return asked is not None and "aborted" in self._by_id[asked[-1]].tags

    def divergence(
        self, call: ModelCall, found: Sequence[Interaction], *, side_request: bool = False
    ) -> Divergence | None:
        """Why a call starts a row of its own, where the recorded one stands before it, and `found` (continued_by) cannot help.

        None for the session's first, and for one that goes on where nothing has gone on yet."""
        if not self._by_id or (found and self._is_free(found[0])):
            return None
        asked = self._bodies.get(_body(self._asked_for(call)[-1], call.model))
        if asked is not None:
            if self.superseded_by(call) or self._cut_off(call):
                return Divergence(
                    "retried", "the same call again, after an answer that did not arrive", self._by_id[asked[-1]]
                )
            return Divergence("resampled", "the same call again", self._by_id[asked[-1]])
        if call.previous in self._by_id:  # its conversation, under another set-up
            return diverge(call, [self._by_id[call.previous]])
        ends = [one for one in self._by_id.values() if one.id not in self._extended]
        why = diverge(call, ends[-MOST_ENDS:])
        if side_request and not found:
            other = (
                "it is the client's housekeeping"
                if call.background
                else f"it asks for another model, {call.model[:80]!r}"
            )
            return Divergence("side_request", other, why.against)
        return why

    @contextmanager
    def going_on(self, found: Sequence[Interaction]) -> Iterator[None]:
        """While a call runs that goes on from the first of these, the next one has to start a row of its own."""
        claimed = [one.id for one in found[:1]]
        self._claimed.update(claimed)
        try:
            yield
        finally:
            self._claimed -= Counter(claimed)

    def _is_free(self, one: Interaction) -> bool:
        return one.id not in self._extended and not self._claimed[one.id]

    def _asked_for(self, call: ModelCall) -> list[bytes]:
        """The chain of a call's messages, which is worked out once however much is asked about the call."""
        if self._asked is None or self._asked[0] is not call:
            self._asked = call, self._chain(call.tools, call.messages)
        return self._asked[1]

    def _chain(self, tools: Sequence[Tool], messages: Sequence[Message]) -> list[bytes]:
        """Hash after the tools, after the first message, ... after the last: len(messages) + 1 values."""
        chain = [_digest(tools_key(tools))]
        for message, place in placed(messages):
            chain.append(_digest(chain[-1] + self._key(message) + place))
        return chain

    def _key(self, message: Message) -> bytes:
        known = self._messages.get(message)
        return _digest(message_key(message)) if known is None else known[1]

    def _kept(self, message: Message) -> Message:
        known = self._messages.get(message)
        if known is None:
            known = self._messages[message] = message, _digest(message_key(message))
            self.size += 500 + len(message.content) + len(message.reasoning)
            self.size += sum(200 + len(call.arguments) for call in message.tool_calls)
        return known[0]


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


def _preference(call: ModelCall, one: Interaction) -> tuple[bool, bool, bool, int]:
    ids_kept = same_ids(one, call.messages)
    return one.id != call.previous, not ids_kept, not NOT_A_STEP.isdisjoint(one.tags), -one.index


def _body(chain: bytes, model: str) -> bytes:
    return chain + model.encode("utf-8", "replace")
