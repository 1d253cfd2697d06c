"""The sandbox chat templates run in: immutable, bounded in CPU time and in the text it makes (settled 23).

    sandbox = Sandbox(trim_blocks=True)
    template = sandbox.from_string(source)
    sandbox.start()                          # a rendering begins on this thread: full budgets
    template.generate(variables)             # jinja2.TemplateError when a budget is used up

Templates come with models from strangers. Jinja hands back control only where a template writes something, so loops and
macros call `tick`, and every operation that can make something large is charged **before** it runs: products, sums,
`~`, formats, padding, replacing, joining, slices, captured blocks, and containers that become text. What cannot grow is
not charged. One budget per rendering, so that keeping many middling texts ends too. Used by template.py.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.sandbox
import jinja2.visitor

MAX_MADE_CHARACTERS = 256_000_000  # by all operations of one rendering together
MAX_CPU_S = 5.0

_NODE = 64  # what one element of a container counts, so that walking one stays quick
_MAX_INTEGER_BITS = 4096
_Text = str | bytes

# Filters that turn their whole argument into text, and those that cost far more than they make.
_TEXTUAL = frozenset(
    ["string", "tojson", "join", "pprint", "escape", "e", "forceescape", "xmlattr", "urlencode", "format"]
)
_LOOP = frozenset(["first", "last", "index", "index0", "length", "previtem", "nextitem"])
_SLOW = frozenset(["wordwrap", "urlize", "striptags", "title", "wordcount", "pprint"])


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Thread-safe: the budgets of a rendering are its thread's."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def __init__(self, *, tojson: Callable[..., str], **options: Any) -> None:
        """tojson: the filter of that name, in place of Jinja's, which escapes HTML characters."""
        super().__init__(finalize=self._finalized, **options)
        self._rendering = threading.local()
        self.filters["tojson"] = tojson
        self.filters = {name: self._guarded(name, one) for name, one in self.filters.items()}
        del self.globals["lipsum"]  # makes any amount of text

    def start(self) -> None:
        """A rendering begins on this thread."""
        self._rendering.ticks = 0
        self._rendering.until = None
        self._rendering.left = MAX_MADE_CHARACTERS

    def tick(self) -> None:
        """One loop round or call; looks at the clock at every 64th."""
        self._rendering.ticks += 1
        if self._rendering.ticks % 64 == 0:
            now = time.thread_time()  # a system call: a short rendering makes none
            self._rendering.until = self._rendering.until or now + MAX_CPU_S
            if now > self._rendering.until:
                raise jinja2.TemplateError(f"it ran for more than {MAX_CPU_S:.0f} s of CPU time")

    def charge(self, characters: int) -> None:
        """Something of this size is about to be made."""
        self._rendering.left -= characters
        if self._rendering.left < 0:
            raise jinja2.TemplateError(f"it makes texts or lists out of range, over {MAX_MADE_CHARACTERS} characters")

    def concat(self, parts: Iterable[str]) -> str:
        """What macros and captured blocks are put together with."""
        parts = list(parts)
        self.charge(sum(map(len, parts)))
        return "".join(parts)

    def joined(self, *values: Any) -> str:
        """`a ~ b ~ c`."""
        self.charge(sum(self._weight(value) for value in values))
        return "".join(str(value) for value in values)

    def added(self, first: Any, *others: Any) -> Any:
        """`a + b + c`, from the left."""
        if type(first) is str and {str}.issuperset(
            map(type, others)
        ):  # almost always: a turn is put together like this
            self.charge(len(first) + sum(map(len, others)))
            return "".join((first, *others))
        total = first
        for value in others:
            self._check_operation("+", total, value)
            total = total + value
        return total

    def sliced(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """`value[start:stop:step]`."""
        self.charge(_bulk(value))
        return value[start:stop:step]

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)  # what nearly all is asked of; Jinja goes through an error or a list of checks for it
        if kind is dict and attribute in obj and not hasattr(dict, attribute):
            return obj[attribute]
        if kind is jinja2.runtime.LoopContext and attribute in _LOOP:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        self._check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def _check_operation(self, operator: str, left: Any, right: Any) -> None:
        if isinstance(left, int | float) and isinstance(right, int | float):
            self._check_numbers(operator, left, right)
        elif operator == "**":
            raise jinja2.TemplateError("a power is out of the range allowed in a chat template")
        elif operator == "*":
            repeated, times = (right, left) if isinstance(left, int) else (left, right)
            self.charge(_bulk(repeated) * max(0, times))
        elif operator == "+":
            self.charge(_bulk(left) + _bulk(right))
        elif isinstance(left, _Text):
            self.charge(self._formatted(left, [right]))

    def call(self, context: jinja2.runtime.Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        if (
            getattr(called, "__self__", None) is self
        ):  # tick, sliced, joined, added, as _parse wrote them into the template
            return called(*args)  # Jinja's own keywords are not meant for them
        self.tick()
        method = getattr(called, "__wrapped__", called)  # Jinja wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, _Text):
            if name == "join" and args:
                args = (list(args[0]), *args[1:])
            self.charge(self._text_made(owner, name, [*args, *kwargs.values()]))
        elif isinstance(owner, int):
            self.charge(_integers(args))
        return super().call(context, called, *args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        self.start()  # constant expressions are worked out while compiling
        tree: jinja2.nodes.Template = _Calls(self).visit(super()._parse(source, name, filename))
        for node in tree.find_all((jinja2.nodes.For, jinja2.nodes.Macro, jinja2.nodes.CallBlock)):
            assert isinstance(node, jinja2.nodes.For | jinja2.nodes.Macro | jinja2.nodes.CallBlock)
            tick = jinja2.nodes.ExprStmt(_own("tick", []), lineno=node.lineno)
            tick.set_environment(self)
            node.body.insert(0, tick)
        return tree

    def _check_numbers(self, operator: str, left: float, right: float) -> None:
        if operator == "**" and not (abs(left) <= 1_000_000 and abs(right) <= 64):
            raise jinja2.TemplateError("a power is out of the range allowed in a chat template")
        bits = sum(side.bit_length() for side in (left, right) if isinstance(side, int))
        if operator == "*" and bits > _MAX_INTEGER_BITS:
            raise jinja2.TemplateError("a product is out of the range allowed in a chat template")

    def _finalized(self, value: Any) -> Any:
        if not isinstance(value, str):
            self.charge(self._weight(value))
        return value

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        skipped = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context, or this environment

        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            mine = list(args)
            if name == "join" and len(mine) > skipped and not isinstance(mine[skipped], _Text | Mapping):
                mine[skipped] = list(mine[skipped])
            value, *rest = [*mine[skipped:], None]
            self.charge(self._filtered(name, value, [*rest, *kwargs.values()]))
            return function(*mine, **kwargs)

        return guarded

    def _filtered(self, name: str, value: Any, rest: list[Any]) -> int:
        weighed = self._weight(value) if name in _TEXTUAL or isinstance(value, _Text) else 0
        if name == "format":
            return self._formatted(str(value), rest)
        if name == "join":
            return weighed + self._lengths(rest) * (len(value) if hasattr(value, "__len__") else 0)
        if name == "replace":
            return self._text_made(str(value), name, rest)
        factor = 100 if name in _SLOW else 1
        return weighed * factor * (1 + _integers(rest) if name in ("tojson", "indent") else 1) + _integers(rest)

    def _text_made(self, text: _Text, name: str, args: list[Any]) -> int:
        """The longest result of a text's method."""
        if name in ("format", "format_map"):
            return self._formatted(text, args)
        if name == "join":
            return self._weight(args[:1]) + len(text) * len(args[0]) if args else 0
        if name == "replace" and len(args) > 1 and isinstance(args[0], type(text)) and isinstance(args[1], type(text)):
            return len(text) + text.count(args[0]) * len(args[1])  # type: ignore[arg-type]
        if name == "translate":
            return len(text) * (1 + max((len(to) for to in _values(args) if isinstance(to, str)), default=0))
        if name == "expandtabs":
            return len(text) * (9 + _integers(args))
        return len(text) + _integers(args)

    def _formatted(self, pattern: _Text, values: Sequence[Any]) -> int:
        shown = pattern if isinstance(pattern, str) else pattern.decode("latin-1")
        widths = [int(digits[:12]) for digits in re.findall(r"\d+", shown)]
        if "*" in shown or re.search(r"\{[^}]*\{", shown):  # a width may be an argument
            widths += [abs(value) for value in _values(values) if isinstance(value, int)]
        places = 1 + shown.count("%") + shown.count("{")
        return len(shown) + sum(widths) * places + self._weight(list(values)) * places

    def _lengths(self, values: Iterable[Any]) -> int:
        return sum(len(value) for value in values if isinstance(value, _Text))

    def _weight(self, value: Any) -> int:
        """About how long `str(value)` is; counting ends where the budget does."""
        total, left, stack = 0, self._rendering.left, [value]
        while stack and total <= left:
            one = stack.pop()
            if isinstance(one, _Text):
                total += len(one)
                continue
            total += _NODE
            if isinstance(one, Mapping):
                stack += one.keys()
                stack += one.values()
            elif isinstance(one, list | tuple | set | frozenset):
                stack += one
            elif isinstance(one, range):
                total += 8 * len(one)
        return total


class _Calls(jinja2.visitor.NodeTransformer):
    """`a ~ b` and slices become calls of Sandbox.joined and .sliced, because Jinja has no hook for them; and `a + b + c` one of
    .added, because a hook for each sum is most of what a rendering costs."""

    def __init__(self, environment: Sandbox) -> None:
        self._environment = environment

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        return self._call("joined", node, lambda: node.nodes)

    def visit_Add(self, node: jinja2.nodes.Add) -> jinja2.nodes.Node:
        first, others = node.left, [node.right]
        while isinstance(first, jinja2.nodes.Add):
            others.append(first.right)
            first = first.left
        if len(others) == 1:
            return self.generic_visit(node)
        return self._calling("added", node, [self.visit(one) for one in (first, *reversed(others))])

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Node:
        cut = node.arg
        if not isinstance(cut, jinja2.nodes.Slice):
            return self.generic_visit(node)
        nothing = jinja2.nodes.Const(None)
        return self._call(
            "sliced", node, lambda: [node.node, cut.start or nothing, cut.stop or nothing, cut.step or nothing]
        )

    def _call(
        self, name: str, node: jinja2.nodes.Node, arguments: Callable[[], list[jinja2.nodes.Expr]]
    ) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return self._calling(name, node, arguments())

    def _calling(self, name: str, node: jinja2.nodes.Node, arguments: list[jinja2.nodes.Expr]) -> jinja2.nodes.Node:
        call = _own(name, arguments)
        call.set_lineno(node.lineno)
        call.set_environment(self._environment)
        return call


def _own(name: str, arguments: list[jinja2.nodes.Expr]) -> jinja2.nodes.Call:
    return jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute(name), arguments, [], None, None)


def _bulk(value: Any) -> int:
    """What a copy of a text or a list takes; a reference counts 8."""
    return len(value) if isinstance(value, _Text) else 8 * len(value) if isinstance(value, Sequence) else 0


def _integers(values: Iterable[Any]) -> int:
    return sum(abs(value) for value in values if isinstance(value, int))


def _values(values: Iterable[Any]) -> list[Any]:
    """The values, and those inside mappings and tuples among them."""
    found: list[Any] = []
    for value in values:
        found += value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple) else [value]
    return found
