"""Conversations to token ids, and on from what was sampled: a recorded token is never tokenised a second time.

    renderer = JinjaRenderer(tokenizer, template)
    prompt = renderer.render(messages, tools)                  # template, then tokenizer, once
    prompt = renderer.extend(recorded, messages, tools)        # recorded ids + only what the new messages add
    if isinstance(prompt, Mismatch): ...                       # the template rewrites history: a new branch

`extend` renders the new conversation and looks for the recorded one in it: the recorded prompt must be its beginning, the
sampled answer must follow, and what comes after the answer (found by rendering once more with a marker in its place)
is the only text that is tokenised. Token ids and text agree with a full rendering wherever the sampled text survives a round
trip through the template; where it would not (T050), the sampled ids stand. Cost: the tokenisation of the new text and four
renderings, of a short stand-in where the conversation is long (window.py), so that turn 100 costs what turn 10 does; only
where the stand-in shows a difference, and from time to time, it is the whole. Templates: template.py. Matching of messages:
canonical.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from areal.base.errors import BadRequest
from areal.base.types import Constraint, Interaction, Message, Tool
from areal.chat.base import Mismatch, RenderedPrompt, Tokenizer
from areal.chat.canonical import difference, tools_key, visible
from areal.chat.constraint import constrained_grammar
from areal.chat.reasoning import reasoning_style
from areal.chat.stream_parser import AnswerForm, StreamParser
from areal.chat.template import ChatTemplate
from areal.chat.tool_formats import tool_format
from areal.chat.window import stand_in, whole_check_due
from areal.config.rollout import ReasoningParser, ToolCallParser

_MARKER = "areal-answer-8d1f0c"  # stands in an answer's place; no white space at its ends that a template could trim


class JinjaRenderer:
    """A chat.base.Renderer over one model's template and tokenizer. Stateless; safe to share.

    tool_call_parser, reasoning_parser: see tool_formats and reasoning.py; the defaults follow the template."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        tool_call_parser: ToolCallParser = "qwen",
        reasoning_parser: ReasoningParser = "qwen3",
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self._tool_format = tool_format(tool_call_parser, template.source)
        self._reasoning = reasoning_style(reasoning_parser, template.source)
        # Of answers without tools and with them.
        forms = AnswerForm(self._reasoning), AnswerForm(self._reasoning, tool_format=self._tool_format)
        self._special = tuple(form.special_markers(tokenizer) for form in forms)

    def parser(self, prompt_text: str, tools: Sequence[Tool] = (), *, stop: Sequence[str] = ()) -> StreamParser:
        """See Renderer.parser."""
        special = self._special[bool(tools)]
        return StreamParser(self.tokenizer, self._form(prompt_text, tools), stop=stop, special=special)

    def grammar(self, prompt_text: str, tools: Sequence[Tool], constraint: Constraint) -> str:
        """See Renderer.grammar."""
        form = self._form(prompt_text, tools)
        source = self.template.source
        return constrained_grammar(constraint, form, self.tokenizer, template=source, prompt=prompt_text)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), kwargs: Mapping[str, Any] | None = None
    ) -> RenderedPrompt:
        """See Renderer.render. The template writes BOS itself if the model wants one; none is added here (T052)."""
        text = self.template.render(messages, tools, kwargs, add_generation_prompt=True)
        return RenderedPrompt(np.array(self.tokenizer.encode(text), dtype=np.int32), text)

    def extend(
        self,
        recorded: Interaction,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt | Mismatch:
        """See Renderer.extend. Raises BadRequest if the template refuses the new messages themselves."""
        if tools_key(recorded.tools) != tools_key(tools):
            return Mismatch("the tools changed", "tools_changed")
        reason = difference(recorded, messages)
        if reason:
            return Mismatch(reason, "history_changed")
        after = self._verified(recorded, messages, tools, kwargs)
        return after if isinstance(after, Mismatch) else self._joined(recorded, after)

    def _verified(
        self,
        recorded: Interaction,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        kwargs: Mapping[str, Any] | None,
    ) -> str | Mismatch:
        """As `_behind`, of a stand-in where that agrees: a refusal or a difference is always the whole conversation's."""
        history, new = recorded.messages, messages[len(recorded.messages) + 1 :]
        if not self.template.counts and not whole_check_due(len(history), len(messages)):
            short = stand_in(history)
            if len(short) < len(history):
                with suppress(BadRequest):
                    after = self._behind(recorded, short, new, tools, kwargs)
                    if isinstance(after, str):
                        return after
        return self._behind(recorded, history, new, tools, kwargs)

    def _behind(
        self,
        recorded: Interaction,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Tool],
        kwargs: Mapping[str, Any] | None,
    ) -> str | Mismatch:
        """The text behind the recorded answer, its end-of-turn marker included, or why the recorded ids do not stand.

        history: the recorded messages, or their stand-in. Raises BadRequest if the template refuses the whole."""
        reply = recorded.reply
        full = self.template.render([*history, reply, *new], tools, kwargs, add_generation_prompt=True)
        try:
            opening = self.template.render(history, tools, kwargs, add_generation_prompt=True)
            bare = self.template.render(history, tools, kwargs, add_generation_prompt=False)
            after = self._after_answer(history, reply, new, tools, kwargs)
        except BadRequest as error:
            return Mismatch(f"the template refuses part of the conversation: {error}", "template_rewrites")
        if not full.startswith(opening):
            said = "the template renders the recorded prompt differently once it is answered"
            return Mismatch(
                said, "reasoning_stripped" if _thought_lost(history, opening, full) else "template_rewrites"
            )
        if after is None or not full.endswith(after):
            return Mismatch("the template leaves out the answer, or writes it among other text", "template_rewrites")
        if opening.startswith(bare) and not self._ends_with(recorded.prompt_ids, opening[len(bare) :]):
            said = "the recorded prompt asked for its answer in another way (template arguments changed)"
            return Mismatch(said, "template_arguments")
        return self._rewritten(recorded, full[len(opening) : len(full) - len(after)]) or after

    def _form(self, prompt_text: str, tools: Sequence[Tool]) -> AnswerForm:
        """How an answer to this prompt is read."""
        style = self._reasoning
        return AnswerForm(
            reasoning=style,
            in_reasoning=style is not None and style.opened_by(prompt_text),
            tool_format=self._tool_format if tools else None,
            tools=tuple(tools),
        )

    def _after_answer(
        self,
        history: Sequence[Message],
        reply: Message,
        new: Sequence[Message],
        tools: Sequence[Tool],
        kwargs: Mapping[str, Any] | None,
    ) -> str | None:
        """The text of a full rendering from the end of the reply on, its end-of-turn marker included; None if unknown.

        Found with a marker as the reply. Templates that refuse tool results after a reply without tool calls get the marker
        as the calls' name; the turn then ends at the first end-of-turn text behind it."""
        marked = Message("assistant", _MARKER)
        try:
            text = self.template.render([*history, marked, *new], tools, kwargs, add_generation_prompt=True)
        except BadRequest:
            if not reply.tool_calls:
                raise
            calls = tuple(replace(call, name=_MARKER) for call in reply.tool_calls)
            named = replace(reply, reasoning="", tool_calls=calls)
            text = self.template.render([*history, named, *new], tools, kwargs, add_generation_prompt=True)
            ended = self.template.render([*history, marked], tools, kwargs, add_generation_prompt=False)
            end = ended.rpartition(_MARKER)[2] if _MARKER in ended else ""
            tail = text.rpartition(_MARKER)[2]
            return tail[tail.index(end) :] if end and end in tail else None
        return text.rpartition(_MARKER)[2] if _MARKER in text else None

    def _rewritten(self, recorded: Interaction, answer: str) -> Mismatch | None:
        """Why `answer`, the template's text of the recorded reply, is not what was sampled; None if it is.

        White space is the template's own affair. With tool calls the sampled JSON is printed anew, so there it is enough
        that nothing of the reply is missing."""
        reply, shown = recorded.reply, _squeezed(answer)
        ids = self._without_end(recorded)
        sampled = _squeezed(self.tokenizer.decode(ids, skip_special=True))
        if shown == sampled or shown == _squeezed(self.tokenizer.decode(ids, skip_special=False)):
            return None
        stripped = Mismatch("the template leaves out the reasoning of earlier turns", "reasoning_stripped")
        if reply.reasoning and _squeezed(reply.reasoning) not in shown:
            return stripped
        if _squeezed(reply.content) not in shown:
            if visible(reply.content) != reply.content.strip():
                return stripped
            return Mismatch("the template writes the answer differently", "not_reproducible")
        if reply.tool_calls and all(_squeezed(call.name) in shown for call in reply.tool_calls):
            return None
        if not shown:
            return Mismatch("the template leaves out the answer", "template_rewrites")
        if sampled.startswith(shown):
            return Mismatch("the answer was cut at a stop text, its ids go further", "not_reproducible")
        return Mismatch("the template writes the answer differently", "not_reproducible")

    def _joined(self, recorded: Interaction, after: str) -> RenderedPrompt:
        """Recorded ids, then the ids of `after` without the end token that was sampled already."""
        sampled = recorded.completion.token_ids
        end = int(sampled[-1]) if len(sampled) and int(sampled[-1]) in self.tokenizer.eos_ids else None
        ids = self._continued(after) if end is None else self._after_end(end, after)
        joined = np.concatenate([recorded.prompt_ids, sampled, np.array(ids, dtype=np.int32)])
        return RenderedPrompt(joined.astype(np.int32, copy=False), after, recorded.id)

    def _after_end(self, end: int, after: str) -> list[int]:
        """Ids of `after` less its end token: `end` was sampled and stands for it, also where it is another one."""
        ids = self.tokenizer.encode(after)
        spaces = 0
        while spaces < len(ids) and self.tokenizer.piece(ids[spaces]).isspace():
            spaces += 1
        if spaces < len(ids) and ids[spaces] in self.tokenizer.eos_ids:
            return ids[spaces + 1 :]
        return self.tokenizer.encode(self.tokenizer.decode([end], skip_special=False) + after)[1:]

    def _continued(self, after: str) -> list[int]:
        """Ids of `after` in mid-text: SentencePiece would put a space before its first word, an anchor prevents it."""
        if self.tokenizer.strips_first_space:
            anchor = self.tokenizer.encode("\n")
            ids = self.tokenizer.encode("\n" + after)
            if ids[: len(anchor)] == anchor:
                return ids[len(anchor) :]
        return self.tokenizer.encode(after)

    def _without_end(self, recorded: Interaction) -> list[int]:
        ids: list[int] = recorded.completion.token_ids.tolist()
        return ids[:-1] if ids and ids[-1] in self.tokenizer.eos_ids else ids

    def _ends_with(self, ids: Any, text: str) -> bool:
        """Whether the ids end in `text`; a token carries at least one byte, so that many ids are enough to look at."""
        tail = ids[-(len(text.encode()) + 1) :].tolist()
        return self.tokenizer.decode(tail, skip_special=False).endswith(text)


def end_of_turn(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The id of the special token with which the template ends an answer, if it ends it with one.

    A base model's files name only the end of a document, but a model served through a template must stop where a turn ends."""
    turns = [Message("user", "?"), Message("assistant", _MARKER), Message("user", "?")]
    try:
        text = template.render(turns, add_generation_prompt=False)
    except BadRequest:
        return ()
    after = tokenizer.encode(text.rpartition(_MARKER)[2])
    asked = tokenizer.encode(template.render(turns[:1], add_generation_prompt=False))
    is_special = bool(after) and not tokenizer.piece(after[0]) and after[0] not in asked[:1]
    return (after[0],) if is_special else ()


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _thought_lost(history: Sequence[Message], before: str, after: str) -> bool:
    """Whether the reasoning of an earlier answer stands in the one rendering and not in the other."""
    before, after = _squeezed(before), _squeezed(after)
    thoughts = (
        one.reasoning or (one.content.partition("</think>")[0] if "</think>" in one.content else "")
        for one in history
        if one.role == "assistant"
    )
    return any(one and one in before and one not in after for one in map(_squeezed, thoughts))
