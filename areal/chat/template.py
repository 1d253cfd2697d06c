"""Chat templates: messages and tools become the model's own prompt text, as transformers' apply_chat_template does.

    template = ChatTemplate.load("/models/qwen3", special_tokens={"eos_token": "<|im_end|>"})
    text = template.render(messages, tools, {"enable_thinking": False}, add_generation_prompt=True)

Templates come with models from strangers: they run in a sandbox (sandbox.py), with a bound on the source, on the
text they make and on the CPU time they take. A template that raises is the request's fault: BadRequest with
its reason. What templates get to see is template_input.py's. Used by renderer.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from areal.base.errors import BadRequest, ConfigError
from areal.base.logs import announce
from areal.base.types import Message, Tool
from areal.chat.sandbox import Sandbox
from areal.chat.template_input import Arguments, TemplateNeeds, has_object_arguments, one_call_a_turn, template_input
from areal.models.tokenizer import read_json

MAX_SOURCE_CHARACTERS = 1_000_000
MAX_TEXT_CHARACTERS = 64_000_000

CHATML = r"""
{%- for message in messages %}
    {{- "<|im_start|>" + message.role + "\n" + message.content + "<|im_end|>\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}
"""


def _attempts(messages: Sequence[Message]) -> Iterator[tuple[Sequence[Message], Arguments]]:
    """How a conversation may be shown to a template that refuses it otherwise; only tool calls leave a choice."""
    yield messages, "decoded"
    calls = [call for message in messages for call in message.tool_calls]
    if not all(map(has_object_arguments, calls)):
        yield messages, "wrapped"
    if calls:
        yield messages, "text"
    if any(len(message.tool_calls) > 1 for message in messages):
        yield one_call_a_turn(messages), "decoded"
        yield one_call_a_turn(messages), "wrapped"


class ChatTemplate:
    """One compiled template. Thread-safe: a rendering keeps its state to itself."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, *, origin: str = "template"
    ) -> None:
        """Raises ConfigError when the source is too long or is not Jinja."""
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise ConfigError(f"{origin} has {len(source)} characters, more than the {MAX_SOURCE_CHARACTERS} allowed")
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._needs = TemplateNeeds.of(source)
        self.counts = self._needs.numbered_ids  # its text of a turn depends on how many calls came before
        try:
            self._environment = _environment()
            self._template = self._environment.from_string(source)
            # Jinja's own is a chain of mappings, which takes long to read, and every rendering reads all of it.
            self._template.globals = dict(self._template.globals)
        except (jinja2.TemplateSyntaxError, RecursionError) as error:
            line = getattr(error, "lineno", "?")
            raise ConfigError(f"{origin}, line {line}: {error}; the model's chat template cannot be used") from error

    @classmethod
    def load(cls, folder: str | Path, special_tokens: Mapping[str, str]) -> ChatTemplate:
        """The model's own: chat_template.jinja, else chat_template in tokenizer_config.json (text, or a list of named
        ones: "default" is taken), else ChatML, said once in the log."""
        folder = Path(folder)
        file = folder / "chat_template.jinja"
        if file.is_file():
            return cls(file.read_text("utf-8"), special_tokens, origin=str(file))
        config = folder / "tokenizer_config.json"
        said = read_json(config).get("chat_template")
        if isinstance(said, list):
            named = {entry["name"]: entry["template"] for entry in said}
            if "default" not in named:
                raise ConfigError(
                    f"{config} names chat templates {sorted(named)}, none is `default`; choose one of them"
                )
            said = named["default"]
        if said is None:
            announce("Chat", f"{folder} has no chat template; ChatML is used")
            return cls(CHATML, special_tokens, origin="the ChatML default")
        return cls(said, special_tokens, origin=f"chat_template in {config}")

    @classmethod
    def read(cls, file: str | Path, special_tokens: Mapping[str, str] | None = None) -> ChatTemplate:
        """From a file of one's own (rollout.agent.chat_template). Raises ConfigError when it cannot be read or used."""
        try:
            source = Path(file).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"rollout.agent.chat_template: cannot read {str(file)!r} ({error}); name a Jinja file, or take it out"
            ) from error
        return cls(source, special_tokens, origin=str(file))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The prompt text. kwargs reach the template as variables. Raises BadRequest with the template's own reason."""
        if kwargs and "chat_template" in kwargs:
            raise BadRequest(
                "a request cannot bring its own chat template; leave chat_template out", param="chat_template"
            )
        refusals = []
        for shown, form in _attempts(messages):
            try:
                return self._text(shown, tools, kwargs or {}, add_generation_prompt, form)
            except BadRequest as error:
                refusals.append(error)
        raise refusals[0]

    def _text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        kwargs: Mapping[str, Any],
        add_generation_prompt: bool,
        arguments: Arguments,
    ) -> str:
        shown_messages, shown_tools = template_input(messages, tools, self._needs, arguments)
        variables = {
            **self._special_tokens,
            **kwargs,
            "messages": shown_messages,
            "tools": shown_tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        self._environment.start()
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(variables):
                size += len(part)
                if size > MAX_TEXT_CHARACTERS:
                    raise jinja2.TemplateError(f"the text grew over {MAX_TEXT_CHARACTERS} characters")
                parts.append(part)
        except jinja2.TemplateError as error:
            raise BadRequest(f"the model's chat template refuses these messages: {error}", param="messages") from error
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise BadRequest(
                f"the model's chat template fails on these messages: {reason}", param="messages"
            ) from error
        return "".join(parts)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what is sampled; for the text it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration is a class attribute)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> Sandbox:
    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols], tojson=_tojson
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML characters, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
