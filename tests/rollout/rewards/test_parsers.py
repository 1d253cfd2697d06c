"""A judge's answer becomes the number it says, or nothing; never a guess."""

from __future__ import annotations

import re

import pytest

from areal.config.reward import Parser, RewardConfig
from areal.config.rewarded import _OF_PARSERS
from areal.config.run import RunConfig
from areal.rollout.rewards.parsers import LONGEST, Reading
from areal.rollout.rewards.source import Unreadable

DEFAULT = RewardConfig()
WORDS = {"good": tuple(DEFAULT.good), "bad": tuple(DEFAULT.bad)}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.7", 0.7),
        (" 1 ", 1.0),
        ("Score: 0.8", 0.8),
        ("**Score:** 8/10", 0.8),
        ("0.5.", 0.5),
        ("```\n0.5\n```", 0.5),
        ('```json\n{"score": 0.4}\n```', 0.4),
        ("At first the score is 0.3. Then I looked again.\nFinal score: 0.9", 0.9),
        ("80%", 0.8),
        ("The rating is 0.5 out of 1", 0.5),
        ("Reward：0.3", 0.3),
        ("<think>0.1, or 0.2? score: 0.9</think> 0.6", 0.6),
        ("It deserves `0.25`, I would say!", 0.25),
        ("score = 1e-1", 0.1),
        ("", "no number"),
        ("nan", "no number"),
        ("infinite", "no number"),
        ("between 0 and 1", "2 numbers, and none follows"),
        ("1. It is short.\n2. It is right.", "2 numbers"),
        ("1.2", "1.2 is not within 0 and 1"),
        ("-1", "-1 is not within"),
        ("3/0", "is no share"),
        ("<think>0.9", "no number"),
    ],
)
def test_a_number_is_read_or_nothing(text: str, value: float | str) -> None:
    reading = Reading("number")
    if isinstance(value, float):
        assert reading.one(text) == pytest.approx(value)
    else:
        with pytest.raises(Unreadable, match=value):
            reading.one(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("correct", 1.0),
        ("Incorrect.", 0.0),
        ("Is it incorrect? At first sight.\n**Verdict:** correct", 1.0),
        ("verdict: INCORRECT\nOn reflection, verdict is correct", 1.0),
        ("It is [[wrong]].", 0.0),
        ("It says 4, which is fine.\nThat is correct.", 1.0),
        ("The answer is not correct", None),
        ("It isn't quite correct", None),
        ("This cannot be correct", None),
        ("correct and incorrect", None),
        ("Verdict: not correct", None),
        ("maybe", None),
        ("incorrectly labelled", None),
        ("", None),
    ],
)
def test_a_verdict_is_read_or_nothing(text: str, value: float | None) -> None:
    reading = Reading("verdict", **WORDS, bounds=(-1.0, 1.0))
    if value is None:
        with pytest.raises(Unreadable, match="no single verdict"):
            reading.one(text)
    else:
        assert reading.one(text) == value * 2 - 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"score": 0.5}', 0.5),
        ('First {"score": 1}, but then:\n```json\n{"why": "a } b", "score": 0.25}\n```\nHope it helps.', 0.25),
        ('{"score": true}', 1.0),
        ('{"score": "8/10"}', 0.8),
        ('{"result": 1}', "no JSON object with 'score'"),
        ('{"score": null}', "'None' is no number"),
        ('{"score": NaN}', "no finite number"),
        ('{"score": 1e400}', "no finite number"),
        ('{"score": [1]}', "is no number"),
        ("{{{", "no JSON object"),
        (r"\frac{1}{2} " * 500 + ' { "score": 0.5 }', 0.5),
        ('{"score":' + "[" * 40_000, "no JSON object"),
    ],
)
def test_a_field_is_read_or_nothing(text: str, value: float | str) -> None:
    reading = Reading("json")
    if isinstance(value, float):
        assert reading.one(text) == value
    else:
        with pytest.raises(Unreadable, match=re.escape(value)):
            reading.one(text)


def test_several_scores_are_read_whole_or_not_at_all() -> None:
    reading = Reading("json", "scores", scale=2, offset=-1)
    assert reading.several('so: {"scores": [0, 0.5, "1"]}', 3) == [-1, 0, 1]
    for text in (
        '{"scores": [0, 1]}',
        '{"scores": 1}',
        '{"scores": [0, 1, null]}',
        '{"scores": [0, 1, 2]}',
        "[0, 1, 1]",
    ):
        with pytest.raises(Unreadable):
            reading.several(text, 3)


def test_a_number_is_clipped_where_that_is_wanted_and_then_scaled() -> None:
    reading = Reading("number", bounds=(0, 10), clip=True, scale=0.2, offset=-1)
    assert [reading.one(text) for text in ("12", "-3", "5", "9/10")] == pytest.approx([1, -1, 0, 0.8])
    with pytest.raises(Unreadable, match="larger than"):
        Reading("number", bounds=None, scale=1e9).one("5")
    with pytest.raises(Unreadable, match="finite"):
        reading.reward(float("inf"))


@pytest.mark.timeout(120)
def test_an_endless_answer_is_read_in_no_time() -> None:
    """Whitespace, thoughts, verdicts and braces without an end: rules that went back and forth over them would hold the controller."""
    for text in (" ", "\n", "<think>", "{", "score ", "not ", "8/", "[[", "correct ", "no ", '{"a":['):
        for parser in _OF_PARSERS:
            with pytest.raises(Unreadable):
                Reading(parser, **WORDS).one(text * (4 * LONGEST // len(text)))


def test_the_table_of_parsers_is_the_one_of_the_configuration() -> None:
    assert set(_OF_PARSERS) == set(Parser.__args__)  # type: ignore[attr-defined]


def test_a_function_has_no_bounds_but_its_own() -> None:
    run = {"rollout": {"agent": {"reward_source": "function"}, "reward": {"path": "m:f"}}}
    assert Reading.of(RunConfig.model_validate(run)).reward(-7.5) == -7.5
    run["rollout"]["reward"]["bounds"] = [0, 1]  # type: ignore[index]
    with pytest.raises(Unreadable):
        Reading.of(RunConfig.model_validate(run)).reward(-7.5)
