"""Grammars in the engine: whatever a random net would say, what comes fits the schema, and its log-probs are those under the mask."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from areal.base.errors import BackendError, BadRequest
from areal.base.types import Constraint, GenerateRequest, Message, SamplingParams, TokenChunk, Tool
from areal.chat import JinjaRenderer, load_renderer
from areal.inference.native.engine import Engine
from areal.inference.native.grammars import Grammars, allowed_tokens
from areal.inference.native.sampler import Draw, Mask, sample
from areal.inference.native.scheduler import EngineSettings, Sequence
from areal.models.dense import DenseNet, causal
from areal.models.dense_config import read_config
from areal.models.hf_weights import load_tensors
from areal.models.tiny import write_tiny
from tests.inference.spelling_nets import CONTEXT, DEEPSEEK, TEMPLATE, write_net

CPU = torch.device("cpu")
BOOK = Tool(
    "book",
    "",
    {
        "type": "object",
        "properties": {
            "seats": {"type": "integer", "minimum": 1, "maximum": 9},
            "where": {"type": "string", "enum": ["aisle", "12", "window seat"]},
            "note": {"type": "string", "maxLength": 6},
            "extras": {"type": "array", "items": {"$ref": "#/$defs/Extra"}, "maxItems": 2},
        },
        "required": ["seats", "where"],
        "$defs": {
            "Extra": {
                "type": "object",
                "properties": {"meal": {"type": ["boolean", "null"]}},
                "required": ["meal"],
                "additionalProperties": False,
            }
        },
    },
)
TOOLS = (BOOK, Tool("book_all", "", {"type": "object", "properties": {}}), Tool("now", "", {"properties": {}}))
KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")  # fmt: skip
GLM = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


@dataclass(frozen=True)
class Family:
    """shown: what else stands in the template. special, added: markers that are one token, without and with text."""

    parser: str
    shown: str = ""
    special: tuple[str, ...] = ()
    added: tuple[str, ...] = ()


FAMILIES = {
    "hermes": Family("hermes", added=("<tool_call>", "</tool_call>")),
    "hermes_spelt_out": Family("qwen", "<tool_call>"),
    "hermes_special": Family("hermes", special=("<tool_call>", "</tool_call>")),
    "qwen3_coder": Family("qwen3_coder", added=("<tool_call>", "</tool_call>")),
    "glm": Family("glm"),
    "glm_special": Family("glm", special=GLM),
    "kimi": Family("kimi", special=KIMI),
    "deepseek": Family("deepseek", special=DEEPSEEK),
    "deepseek_fenced": Family("deepseek", "```json", special=DEEPSEEK),
    "mistral": Family("mistral", special=("[TOOL_CALLS]",)),
    "mistral_named": Family("mistral", "[ARGS]", special=("[TOOL_CALLS]", "[ARGS]")),
    "llama3_json": Family("llama3_json"),
    "json": Family("json"),
}


class Model:
    """A net, its renderer, and grammars over its vocabulary."""

    def __init__(self, folder: Path, parser: str = "qwen") -> None:
        self.folder = folder
        self.renderer: JinjaRenderer = load_renderer(folder, tool_call_parser=parser)  # type: ignore[arg-type]
        self.config = read_config(folder)
        self.net = DenseNet.load(folder, dtype=torch.float32, device=CPU, positions=CONTEXT)
        self.eos_ids = frozenset(self.renderer.tokenizer.eos_ids)
        self.grammars = Grammars(folder, vocab_size=self.config.vocab_size, eos_ids=self.eos_ids)
        self.prompt = self.renderer.render([Message("user", "hi")])

    def engine(self, **settings: Any) -> Engine:
        return Engine(self.net, version=1, settings=EngineSettings(max_context=CONTEXT, **settings))

    async def sequence(
        self, engine: Engine, constraint: Constraint | None, seed: int, tools: tuple[Tool, ...] = (), **sampling: Any
    ) -> Sequence:
        """Queued under this constraint."""
        grammar = "" if constraint is None else self.renderer.grammar(self.prompt.text, tools, constraint)
        params = SamplingParams(**{"temperature": 1.0, "max_tokens": 700, "constraint": constraint, **sampling})
        request = GenerateRequest(f"r{seed}", f"s{seed}", self.prompt.ids, params, seed, grammar=grammar)
        matcher = await self.grammars.matcher(grammar, params.stop_token_ids) if grammar else None
        sequence = engine.sequence_of(request, matcher)
        engine.add(sequence)
        return sequence

    def message(self, chunks: list[TokenChunk], tools: tuple[Tool, ...] = ()) -> Message:
        parser = self.renderer.parser(self.prompt.text, tools)
        for chunk in chunks:
            parser.feed(chunk)
        parser.finish()
        return parser.message()

    @torch.inference_mode()
    def logits(self, sequence: Sequence) -> torch.Tensor:
        """[output tokens, vocabulary] by one plain forward pass."""
        ids = torch.from_numpy(sequence.known.astype(np.int64))
        hidden = self.net.forward(ids, torch.arange(len(ids)), causal(self.net.config))
        return self.net.logits(hidden)[sequence.prompt_length - 1 : -1]


def run(engine: Engine, steps: int | None = None) -> dict[Sequence, list[Any]]:
    spoken: dict[Sequence, list[Any]] = {}
    while engine.busy and steps != 0:
        for sequence, event in engine.step():
            spoken.setdefault(sequence, []).append(event)
        steps = None if steps is None else steps - 1
    return spoken


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(write_net(tmp_path_factory.mktemp("net")))


@pytest.mark.parametrize("name", FAMILIES)
async def test_every_forced_call_is_found_and_fits_the_schema_of_its_tool(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    template = TEMPLATE + "{# " + family.shown + " #}"
    model = Model(write_net(tmp_path, template, special=family.special, added=family.added), family.parser)
    engine = model.engine()
    single = [await model.sequence(engine, Constraint(calls=(), parallel=False), k, TOOLS) for k in range(20)]
    named = [
        await model.sequence(engine, Constraint(calls=("book",)), 100 + k, TOOLS, max_tokens=240) for k in range(12)
    ]
    spoken, schemas, called = run(engine), {tool.name: tool.parameters for tool in TOOLS}, []
    for sequence in single + named:
        chunks = spoken[sequence]
        assert {chunk.finish_reason for chunk in chunks[:-1]} <= {None}
        if chunks[-1].finish_reason == "length":  # a random net likes to call again and again
            assert sequence in named
            continue
        message = model.message(chunks, TOOLS)
        assert message.content == ""
        assert len(message.tool_calls) == 1 if sequence in single else message.tool_calls
        for call in message.tool_calls:
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])
            called.append(call.name)
            assert sequence in single or call.name == "book"
    assert len(set(called)) > 1


SCHEMAS: list[dict[str, Any]] = [
    {"enum": ["yes", "no", "perhaps", 7, None]},
    {"type": "integer", "minimum": -5, "maximum": 120},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"kind": {"const": "leaf"}, "left": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["kind", "left"],
        "additionalProperties": False,
    },
    {"type": "string", "pattern": "^[a-c]{2,3}-[0-9]$"},
    {"type": "string", "format": "date"},
    {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, {"type": "array", "maxItems": 0}]},
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:30])
async def test_hundreds_of_answers_all_fit_their_schema(model: Model, schema: dict[str, Any]) -> None:
    engine = model.engine()
    sequences = [await model.sequence(engine, Constraint(schema=schema), k, max_tokens=300) for k in range(40)]
    spoken, complete, texts = run(engine), 0, set()
    for sequence in sequences:
        chunks = spoken[sequence]
        if chunks[-1].finish_reason == "stop":
            text = model.message(chunks).content
            jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
            complete += 1
            texts.add(text)
        assert int(chunks[-1].token_ids[-1]) in model.eos_ids or chunks[-1].finish_reason == "length"
    assert complete >= 30
    assert len(texts) > 2


async def test_the_mask_is_what_the_text_so_far_allows_and_an_end_where_it_is_complete(model: Model) -> None:
    """Twin: of three texts, a token may come where one of them still begins with what there is."""
    texts = [b'"blue"', b'"bluebird"', b'"bl"']
    constraint = Constraint(schema={"enum": ["blue", "bluebird", "bl"]})
    grammar = model.renderer.grammar(model.prompt.text, (), constraint)
    tokenizer = model.renderer.tokenizer
    for text in texts:
        matcher = await model.grammars.matcher(grammar, ())
        for at in range(len(text) + 1):
            [allowed] = allowed_tokens([matcher], model.config.vocab_size)
            pieces = [tokenizer.piece(token) for token in range(model.config.vocab_size)]
            naive = [bool(p) and any(one.startswith(text[:at] + p) for one in texts) for p in pieces]
            for end in model.eos_ids:
                naive[end] = text[:at] in texts
            assert allowed.tolist() == naive
            if at < len(text):
                assert not matcher.accept(tokenizer.encode(chr(text[at]))[0])


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6}, {"temperature": 0.0}, {"top_p": 0.7}, {"top_k": 3}])
async def test_the_recorded_logprob_is_a_masked_log_softmax(model: Model, sampling: dict[str, Any]) -> None:
    engine = model.engine()
    constraint = Constraint(schema=SCHEMAS[3])
    sequences = [await model.sequence(engine, constraint, k, max_tokens=60, **sampling) for k in range(6)]
    spoken = run(engine)
    for sequence in sequences:
        matcher = await model.grammars.matcher(sequence.request.grammar, ())
        scaled = model.logits(sequence) / (sampling.get("temperature", 1.0) or 1.0)
        for chunk, row in zip(spoken[sequence], scaled, strict=True):
            token = int(chunk.token_ids[0])
            [allowed] = allowed_tokens([matcher], model.config.vocab_size)
            assert allowed[token]
            masked = row.masked_fill(torch.from_numpy(~allowed), -torch.inf)
            naive = float(masked.log_softmax(-1)[token])
            assert float(chunk.logprobs[0]) == pytest.approx(naive, abs=1e-4)
            excluded = float(row.double().softmax(-1)[torch.from_numpy(~allowed)].sum())
            assert chunk.constrained is not None
            assert bool(chunk.constrained[0]) == (excluded > 1e-4)
            if sampling.get("temperature") == 0.0:
                assert token == int(masked.argmax())
            if token not in sequence.ends:
                matcher.accept(token)


def test_a_token_whose_rivals_had_no_probability_anyway_is_not_flagged() -> None:
    logits = torch.tensor([[9.0, 8.0, -4.0], [1.0, 0.0, 2.0], [1.0, 0.0, 2.0]])
    allowed = np.array([[True, True, False], [True, True, False]])
    draws = [Draw(SamplingParams(temperature=1.0), seed, 0) for seed in range(3)]
    drawn = sample(logits.clone(), draws, Mask([0, 1], allowed))
    assert drawn.constrained.tolist() == [False, True, False]
    free = sample(logits.clone(), draws)
    assert (drawn.token_ids[2], drawn.logprobs[2]) == (free.token_ids[2], free.logprobs[2])
    assert drawn.token_ids[1] != 2
    poisoned = logits.clone()
    poisoned[1, 2] = torch.nan  # forbidden, and yet a sign that the net is broken
    assert sample(poisoned, draws, Mask([0, 1], allowed)).ok.tolist() == [True, False, True]


async def test_free_requests_beside_it_are_as_they_are_alone(model: Model) -> None:
    alone = model.engine(deterministic=True)
    expected = [await model.sequence(alone, None, 50 + k, max_tokens=20) for k in range(4)]
    run(alone)
    together = model.engine(deterministic=True)
    free = [await model.sequence(together, None, 50 + k, max_tokens=20) for k in range(4)]
    for k in range(4):
        await model.sequence(together, Constraint(schema=SCHEMAS[k]), k, max_tokens=40)
    spoken = run(together)
    assert [one.known.tolist() for one in free] == [one.known.tolist() for one in expected]
    assert all(chunk.constrained is None for one in free for chunk in spoken[one])


@pytest.mark.parametrize("settings", [{}, {"kv_tokens": 1100}, {"deterministic": True}])
async def test_new_weights_and_lost_kv_in_mid_request_leave_the_grammar_where_it_was(
    model: Model, settings: dict[str, Any]
) -> None:
    engine = model.engine(**settings)
    constraint = Constraint(schema=SCHEMAS[3])
    sequences = [await model.sequence(engine, constraint, k, max_tokens=80) for k in range(12)]
    spoken: dict[Sequence, list[Any]] = {}
    tensors = load_tensors(model.folder, model.config.parameter_shapes())
    for version in (2, 3, 4):
        for sequence, events in run(engine, steps=5).items():
            spoken.setdefault(sequence, []).extend(events)
        torch.manual_seed(version)
        other = {name: tensor + 0.02 * torch.randn_like(tensor) for name, tensor in tensors.items()}
        net = DenseNet.from_tensors(model.config, other, dtype=torch.float32, device=CPU, positions=CONTEXT)
        engine.swap(net, version)
    for sequence, events in run(engine).items():
        spoken.setdefault(sequence, []).extend(events)
    for sequence in sequences:
        assert spoken[sequence][-1].finish_reason == "stop"
        jsonschema.validate(json.loads(model.message(spoken[sequence]).content), SCHEMAS[3])
    assert len({int(chunk.versions[0]) for chunks in spoken.values() for chunk in chunks}) > 1


async def test_an_answer_that_is_cut_says_length(model: Model) -> None:
    engine = model.engine()
    sequence = await model.sequence(engine, Constraint(schema=SCHEMAS[3]), 0, max_tokens=4)
    chunks = run(engine)[sequence]
    assert ([chunk.finish_reason for chunk in chunks], len(chunks)) == ([None] * 3 + ["length"], 4)


async def test_a_model_without_ends_stops_where_nothing_can_follow(model: Model) -> None:
    grammars = Grammars(model.folder, vocab_size=model.config.vocab_size, eos_ids=frozenset())
    engine = Engine(model.net, version=1, settings=EngineSettings(max_context=CONTEXT), eos_ids=frozenset())
    grammar = model.renderer.grammar(model.prompt.text, (), Constraint(schema={"const": "done"}))
    request = GenerateRequest("r", "s", model.prompt.ids, SamplingParams(64, 1.0), 0, grammar=grammar)
    sequence = engine.sequence_of(request, await grammars.matcher(grammar, ()))
    engine.add(sequence)
    chunks = run(engine)[sequence]
    assert (model.message(chunks).content, chunks[-1].finish_reason) == ('"done"', "stop")


async def test_a_vocabulary_without_json_is_said_before_anything_is_sampled(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    config = read_config(tmp_path)
    grammars = Grammars(tmp_path, vocab_size=config.vocab_size, eos_ids=frozenset(config.eos_ids))
    renderer = load_renderer(tmp_path)
    prompt = renderer.render([Message("user", "hi")])
    grammar = renderer.grammar(prompt.text, (), Constraint(schema={"type": "boolean"}))
    with pytest.raises(BadRequest, match=r"no token for .*\{ \}.* ask a model") as refused:
        await grammars.matcher(grammar, ())
    assert refused.value.code == "unsupported_parameter"


async def test_a_vocabulary_that_cannot_spell_it_is_an_error_of_that_request_alone(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    tokenizer = tmp_path / "tokenizer.json"  # braces and brackets in the place of four other characters
    swapped = str.maketrans(dict(zip("()+*", "{}[]", strict=True)))
    described = json.loads(tokenizer.read_text())
    vocab = described["model"]["vocab"]
    described["model"]["vocab"] = {word.translate(swapped): token for word, token in vocab.items()}
    tokenizer.write_text(json.dumps(described))
    config = read_config(tmp_path)
    net = DenseNet.load(tmp_path, dtype=torch.float32, device=CPU, positions=200)
    grammars = Grammars(tmp_path, vocab_size=config.vocab_size, eos_ids=frozenset(config.eos_ids))
    engine = Engine(net, version=1, settings=EngineSettings(max_context=200))
    renderer = load_renderer(tmp_path)
    prompt = renderer.render([Message("user", "hi")])
    grammar = renderer.grammar(prompt.text, (), Constraint(schema={"const": "a("}))
    with pytest.raises(BadRequest, match="vocabulary"):
        await grammars.matcher('start: "(" | ")"', ())
    params = SamplingParams(max_tokens=5, temperature=1.0, stop_token_ids=renderer.tokenizer.eos_ids)
    bound = GenerateRequest("a", "a", prompt.ids, params, 0, grammar=grammar)
    free = GenerateRequest("b", "b", prompt.ids, params, 0)
    sequences = [engine.sequence_of(bound, await grammars.matcher(grammar, ())), engine.sequence_of(free)]
    for sequence in sequences:
        engine.add(sequence)
    spoken = run(engine)
    *said, failure = spoken[sequences[0]]
    assert len(said) == 2
    assert isinstance(failure, BackendError)
    assert "vocabulary" in str(failure)
    assert all(isinstance(chunk, TokenChunk) for chunk in spoken[sequences[1]])


THINKING = TEMPLATE + "{# <think></think> #}"


@pytest.mark.parametrize(
    "template",
    [THINKING.replace("assistant\n{%", "assistant\n<think>\n{%"), THINKING],
    ids=["the prompt opens it", "the model may open it"],
)
async def test_a_model_that_reasons_may_think_first(template: str, tmp_path: Path) -> None:
    """A random net never ends its thoughts by itself, so what it samples is written down by hand here and there."""
    model = Model(write_net(tmp_path, template, added=("<think>", "</think>")))
    grammar = model.renderer.grammar(model.prompt.text, (), Constraint(schema=SCHEMAS[3]))
    opened = model.prompt.text.rstrip().endswith("<think>")
    thoughts = ("" if opened else "<think>\n") + 'I {could} say "anything" here.\n</think>\n\n'
    answer = '{"name": "Al", "age": 3}'
    for text in [thoughts + answer, *([] if opened else [answer])]:
        matcher = await model.grammars.matcher(grammar, ())
        for token in model.renderer.tokenizer.encode(text):
            [allowed] = allowed_tokens([matcher], model.config.vocab_size)
            assert allowed[token], text
            assert not allowed[list(model.eos_ids)].any()
            matcher.accept(token)
        [allowed] = allowed_tokens([matcher], model.config.vocab_size)
        assert np.flatnonzero(allowed).tolist() == sorted(model.eos_ids)
    free = Constraint(schema=SCHEMAS[3])
    closed = model.renderer.grammar(model.prompt.text + "<think>\n\n</think>\n\n", (), free)
    [allowed] = allowed_tokens([await model.grammars.matcher(closed, ())], model.config.vocab_size)
    pieces = [model.renderer.tokenizer.piece(int(one)) for one in np.flatnonzero(allowed)]
    assert pieces == [piece for piece in pieces if piece and b'{"name": '.startswith(piece)]


BOMBS: dict[str, dict[str, Any]] = {
    "a product of alternatives": {
        "allOf": [
            {"anyOf": [{"type": "object", "properties": {f"k{i}": {"const": j}}} for j in range(6)]} for i in range(7)
        ]
    },
    "huge automata": {"type": "string", "pattern": "(.*[ab].{500}){20}"},
    "repetitions of repetitions": {"type": "string", "pattern": "(a{1,1000}){1,1000}b"},
    "arithmetic": {"type": "integer", "multipleOf": 99999989, "minimum": 10**15},
    "many optional properties": {"type": "object", "properties": {f"p{i}": {} for i in range(1500)}},
    "a reference to itself": {"$ref": "#"},
    "doubling references": {
        "$defs": {
            **{f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(24)},
            "d24": {"type": "null"},
        },
        "$ref": "#/$defs/d0",
    },
    "deep nesting": {"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}}, "$ref": "#/$defs/a"},
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
async def test_a_schema_made_to_be_expensive_ends_and_the_event_loop_goes_on_meanwhile(model: Model, name: str) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    engine, ticking = model.engine(), asyncio.create_task(tick())
    with contextlib.suppress(BadRequest):  # some are refused, others can be played with
        sequence = await model.sequence(engine, Constraint(schema=BOMBS[name]), 0, max_tokens=40)
        last = run(engine)[sequence][-1]
        assert isinstance(last, BackendError) or last.finish_reason in ("stop", "length")
    ticking.cancel()
    assert ticks > 1


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "strin"}, "strin"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"$ref": "http://example.com/x.json"}, "example.com"),
        ({"type": "string", "pattern": "(?=a)b"}, "look"),
        ({"type": "string", "format": "poem"}, "poem"),
        ({"type": "string", "enum": [1]}, "nsatisfiable"),
    ],
)
async def test_what_cannot_be_kept_is_named_and_stays_refused(model: Model, schema: dict[str, Any], says: str) -> None:
    grammar = model.renderer.grammar(model.prompt.text, (), Constraint(schema=schema))
    for _ in range(2):
        with pytest.raises(BadRequest, match=says) as caught:
            await model.grammars.matcher(grammar, ())
        assert "\n" not in str(caught.value)
    if says in ("uniqueItems", "not", "poem"):
        lenient = model.renderer.grammar(model.prompt.text, (), Constraint(schema=schema, lenient=True))
        await model.grammars.matcher(lenient, ())


async def test_kept_grammars_are_bounded_and_a_forgotten_one_is_compiled_again(model: Model) -> None:
    grammars = Grammars(model.folder, vocab_size=model.config.vocab_size, eos_ids=model.eos_ids)
    texts = [model.renderer.grammar(model.prompt.text, (), Constraint(schema={"const": k})) for k in range(40)]
    for text in [*texts, texts[0]]:
        assert not (await grammars.matcher(text, ())).failure
    assert len(grammars._kept) == 32
    grammars.close()


@torch.inference_mode()
def test_a_token_that_is_not_flagged_has_the_logprob_of_the_free_distribution() -> None:
    """What is trained without a mask was sampled, to four digits, as without one; twin: log-softmax of the whole row."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1500, 60, generator=generator) * 6
    allowed = torch.rand(1500, 60, generator=generator) < 0.7
    allowed[torch.arange(1500), logits.argmax(-1)] = True
    draws = [Draw(SamplingParams(temperature=(0.5, 1.0)[k % 2]), k, k) for k in range(1500)]
    drawn = sample(logits.clone(), draws, Mask(range(1500), allowed.numpy()))
    scaled = logits / torch.tensor([0.5, 1.0]).repeat(750)[:, None]
    tokens = torch.from_numpy(drawn.token_ids.astype(np.int64))[:, None]
    free, masked = (
        row.log_softmax(-1).gather(1, tokens)[:, 0].numpy()
        for row in (scaled, scaled.masked_fill(~allowed, -torch.inf))
    )
    np.testing.assert_allclose(drawn.logprobs, masked, atol=1e-5)
    assert 200 < drawn.constrained.sum() < 1300
    assert np.abs(drawn.logprobs - free)[~drawn.constrained].max() < 1.1e-4
    assert np.abs(masked - free)[drawn.constrained].min() > 0.9e-4
