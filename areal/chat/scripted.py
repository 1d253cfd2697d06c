"""The scripted backend's renderer: ChatML over the script's own vocabulary (docs/scripted.md); or a model's own, in whose tokens
the script is then played.

    renderer = scripted_renderer("script.jsonl")
    text = in_tokens_of(load_renderer("/models/qwen3"), "script.jsonl")     # a script file with that model's ids

A pure function of the files; the server reads the same ones (inference/scripted), so both agree on every id.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from areal.base.errors import ConfigError
from areal.chat.base import Tokenizer
from areal.chat.renderer import JinjaRenderer, end_of_turn
from areal.chat.template import CHATML, ChatTemplate
from areal.config.rollout import ReasoningParser, ToolCallParser
from areal.inference.scripted.script import Script, ScriptedLine, read_script


def scripted_renderer(
    path: str | Path,
    *,
    chat_template: str | Path | None = None,
    tool_call_parser: ToolCallParser = "qwen",
    reasoning_parser: ReasoningParser = "qwen3",
) -> JinjaRenderer:
    """chat_template: a file to use in place of ChatML. Raises ConfigError, as read_script does."""
    own = ChatTemplate(CHATML, origin="the scripted backend's ChatML")
    return JinjaRenderer(
        read_script(path).vocabulary,
        ChatTemplate.read(chat_template) if chat_template else own,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
    )


def in_tokens_of(renderer: JinjaRenderer, path: str | Path) -> str:
    """The script with each line's text in the tokens of a model, its end tokens as that model's end of turn.

    Pieces are not the model's tokens, so what a line says of single pieces is not kept: delays are spread evenly, log-probs are the
    default, ids and candidates are left out, a failure comes after as large a part of the answer. Raises ConfigError, as
    read_script does, and for a model that names no end of an answer."""
    script, tokenizer = read_script(path), renderer.tokenizer
    ends = (*end_of_turn(renderer.template, tokenizer), *tokenizer.eos_ids)
    if not ends:
        raise ConfigError(
            "the model names no token that ends an answer, so a script cannot be played in its tokens; its "
            "generation_config.json needs eos_token_id"
        )
    head = {"settings": {"max_context": script.max_context}}
    lines = [_in_tokens(line, script, tokenizer, ends[0]) for line in script.lines]
    return "".join(msgspec.json.encode(one).decode() + "\n" for one in (head, *lines))


def _in_tokens(line: ScriptedLine, script: Script, tokenizer: Tokenizer, end: int) -> dict[str, Any]:
    ids: list[int] = []
    text = b""
    for token in line.tokens:
        if token.token_id in script.vocabulary.eos_ids:
            ids, text = [*ids, *tokenizer.encode(text.decode("utf-8", "replace")), end], b""
        else:
            text += _spelled(script.vocabulary, token.token_id)
    ids += tokenizer.encode(text.decode("utf-8", "replace"))
    seconds = sum(token.delay_s for token in line.tokens)
    said: dict[str, Any] = {
        "pieces": [{"id": one, "hex": _spelled(tokenizer, one).hex()} for one in ids],
        "finish": line.finish,
        "delay_ms": 1000 * seconds / len(ids) if ids else 0.0,
    }
    if line.when is not None:
        said["when"] = line.when.pattern
    if line.failure is not None:
        at = round(line.failure.at * len(ids) / len(line.tokens)) if line.tokens else 0
        said["fail"] = {"at": at, "status": line.failure.status, "message": line.failure.message}
    return said


def _spelled(tokenizer: Tokenizer, token_id: int) -> bytes:
    """A token's bytes; of a special token, its name."""
    return tokenizer.piece(token_id) or tokenizer.decode([token_id], skip_special=False).encode()
