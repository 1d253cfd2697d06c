"""How a model's answer becomes a reward: a number, a verdict or a field of JSON, out of whatever stands around it.

    reading = Reading.of(config)
    reading.one("**Score:** 8/10")             # 0.8: a share of the upper bound; then offset + scale × it
    reading.several('{"scores": [0, 1]}', 2)   # [0.0, 1.0]

The rules, which docs/rewards.md tells users: reasoning in <think> is left out, fences and emphasis are ignored. number: the answer is one number;
else the last that follows "score", "reward", "rating" or "grade" and a colon, "=" or "is"; else the only number there is. verdict: the answer is one
word of good or bad; else the last that follows "verdict", "result", "decision" or "judgment" in the same way, or stands in [[ ]]; else what
the last line says, if it says one thing and does not deny it. json: the field of the last JSON object that has it. Anything else, and a
number out of bounds (unless `clip`), raises Unreadable: a wrong guess would be trained on. Pure.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from areal.config.reward import Parser
from areal.config.rewarded import parser_of
from areal.config.run import RunConfig
from areal.rollout.rewards.source import Unreadable
from areal.store.base import LARGEST_REWARD

LONGEST = 50_000  # characters that are read, the last ones
SHOWN = 200  # of an answer that cannot be read, in its error
MOST_BROKEN = 200  # objects that do not end, in one answer: a model that repeats itself must not hold the run up
MOST_WORDS = 100  # in one line, likewise: that is no verdict

_NUMBER = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
_VALUE = rf"(?<![\w.])(?P<value>{_NUMBER})(?:\s*(?:/|out of)\s*(?P<of>\d+(?:\.\d+)?)|\s*(?P<percent>%))?(?![\w%]|\.\d)"
_IS = r"""["']?\s*(?:[:=：]|\bis\b)\s*["']?\s*"""
_ALONE = re.compile(rf"\s*{_VALUE}[.!\s]*")
_ANY = re.compile(_VALUE)
_NAMED = re.compile(rf"\b(?:score|reward|rating|grade){_IS}{_VALUE}", re.IGNORECASE)
_MARKS = re.compile(r"^```\w*$|\*\*|`", re.MULTILINE)
_OBJECT = re.compile(r'\{\s*"')
_DENIAL = 120  # characters before a verdict, in which it may be denied
_DENIED = re.compile(r"(?:\b(?:can)?not|n['’]t|\bnever|\bneither|\bnor)\s+(?:\w+\s+){0,2}$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Reading:
    """How a run's source is understood. field: of an answer about one session; fields: about several. bounds None: any number."""

    parser: Parser = "number"
    field: str = "score"
    fields: str = "scores"
    good: tuple[str, ...] = ("correct",)
    bad: tuple[str, ...] = ("incorrect",)
    bounds: tuple[float, float] | None = (0.0, 1.0)
    clip: bool = False
    scale: float = 1.0
    offset: float = 0.0

    @classmethod
    def of(cls, config: RunConfig) -> Reading:
        reward = config.rollout.reward
        by_function = config.rollout.agent.reward_source == "function"
        bounds = (reward.bounds[0], reward.bounds[1]) if reward.bounds else None if by_function else (0.0, 1.0)
        field = "score" if reward.field is None or reward.relative else reward.field
        fields = reward.field or "scores"
        words = (tuple(reward.good), tuple(reward.bad))
        return cls(parser_of(config), field, fields, *words, bounds, reward.clip, reward.scale, reward.offset)

    def one(self, text: str) -> float:
        """The reward that an answer about one session gives."""
        said = cleaned(text)
        if self.parser == "number":
            return self.reward(self._number(said))
        if self.parser == "verdict":
            return self.reward(self._verdict(said))
        return self.reward(self._value(_field(said, self.field)))

    def several(self, text: str, count: int) -> list[float]:
        """The rewards that an answer about `count` sessions gives, in their order."""
        scores = _field(cleaned(text), self.fields)
        if not isinstance(scores, list) or len(scores) != count:
            raise Unreadable(f"{self.fields!r} must be a list of {count} numbers, not {_shown(scores)}")
        return [self.reward(self._value(score)) for score in scores]

    def reward(self, value: float) -> float:
        """Of a number that the source gave: within the bounds, then offset + scale × it."""
        if not math.isfinite(value):
            raise Unreadable(f"{value} is no finite number")
        if self.bounds is not None and not self.bounds[0] <= value <= self.bounds[1]:
            if not self.clip:
                raise Unreadable(
                    f"{value:g} is not within {self.bounds[0]:g} and {self.bounds[1]:g} (rollout.reward.bounds)"
                )
            value = min(max(value, self.bounds[0]), self.bounds[1])
        reward = self.offset + self.scale * value
        if not abs(reward) <= LARGEST_REWARD:
            raise Unreadable(f"a reward of {reward:g} is larger than {LARGEST_REWARD:g} in size")
        return reward

    def _number(self, said: str) -> float:
        found = _ALONE.fullmatch(said) or _last(_NAMED.finditer(said))
        if found is not None:
            return self._share(found)
        numbers = list(_ANY.finditer(said))
        if len(numbers) != 1:
            what = f"{len(numbers)} numbers, and none follows `Score:`" if numbers else "no number"
            raise Unreadable(f"there is {what} in {_shown(said)}")
        return self._share(numbers[0])

    def _share(self, found: re.Match[str]) -> float:
        """A plain number, or a share of the upper bound: 8/10, 80 %."""
        value, of = float(found["value"]), found["of"]
        high = self.bounds[1] if self.bounds is not None else 1.0
        if found["percent"]:
            return value / 100 * high
        if of is None:
            return value
        if float(of) == 0:
            raise Unreadable(f"{found[0].strip()} is no share")
        return value / float(of) * high

    def _verdict(self, said: str) -> float:
        words = "|".join(re.escape(word) for word in sorted((*self.good, *self.bad), key=len, reverse=True))
        word = rf"(?<!\w)(?P<word>{words})(?!\w)"
        alone = re.fullmatch(rf"\W*{word}\W*", said, re.IGNORECASE)
        named = re.finditer(
            rf"\b(?:verdict|result|decision|judge?ment){_IS}{word}|\[\[\s*(?P<boxed>{words})\s*\]\]",
            said,
            re.IGNORECASE,
        )
        found = alone or _last(named)
        if found is not None:
            return self._worth(found["word"] if found is alone else found["word"] or found["boxed"])
        line = next((line for line in reversed(said.splitlines()) if line.strip()), "")
        places = list(re.finditer(word, line, re.IGNORECASE))
        worths = {self._worth(place["word"]) for place in places}
        if (
            len(worths) != 1
            or len(places) > MOST_WORDS
            or any(_DENIED.search(line, max(0, place.start() - _DENIAL), place.start()) for place in places)
        ):
            raise Unreadable(f"there is no single verdict in {_shown(said)}")
        return worths.pop()

    def _worth(self, word: str) -> float:
        low, high = self.bounds or (0.0, 1.0)
        return high if word.lower() in {good.lower() for good in self.good} else low

    def _value(self, value: Any) -> float:
        """Of a JSON value."""
        if isinstance(value, bool):
            low, high = self.bounds or (0.0, 1.0)
            return high if value else low
        if isinstance(value, int | float):
            return float(value) if abs(value) <= LARGEST_REWARD or isinstance(value, float) else math.inf
        if isinstance(value, str):
            return self._number(value)
        raise Unreadable(f"{_shown(value)} is no number")


def cleaned(text: str) -> str:
    """What a model answered, without what it thought before, without marks for the eye and without empty lines. A thought that does not end
    leaves no answer."""
    said = text[-LONGEST:].rpartition("</think>")[2].partition("<think>")[0]
    lines = (" ".join(line.split()) for line in _MARKS.sub("", said).splitlines())
    return "\n".join(line for line in lines if line)


def _field(said: str, name: str) -> Any:
    """Of the last JSON object that has it."""
    decoder, found, missing, broken = json.JSONDecoder(), None, True, 0
    start = _OBJECT.search(said)
    while start is not None and broken < MOST_BROKEN:
        try:
            value, end = decoder.raw_decode(said, start.start())
        except (ValueError, RecursionError):
            end, broken = start.end(), broken + 1
        else:
            if isinstance(value, dict) and name in value:
                found, missing = value[name], False
        start = _OBJECT.search(said, end)
    if missing:
        raise Unreadable(f"there is no JSON object with {name!r} in {_shown(said)}")
    return found


def _last(found: Any) -> re.Match[str] | None:
    matches: Sequence[re.Match[str]] = list(found)
    return matches[-1] if matches else None


def _shown(value: Any) -> str:
    text = " ".join(str(value).split())
    return repr(text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} … {text[-SHOWN // 2 :]}")
