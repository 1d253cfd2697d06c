"""A reward or judge model of the upstream channel, asked through the gateway so that its lines stand in gateway.log (settled 25).

    source = ModelSource(client, "judge_model", "qwen3-32b", asking, reading, timeout_s=300, cache_size=10_000)
    [rewards] = await source.rewards([case])

One layer of retry: the channel's own, behind the gateway. A failure that comes through is Away (5xx, no answer in time), Crowded (429 of the provider),
Hopeless where the request itself was refused (too long), or Limited, Spent where the gateway's own bounds refused it before it was sent. The same prompt has the same score: the newest cache_size prompts are remembered in
memory, failures are not, and two calls with one prompt are one. Not kept over a restart: scores are in the store, prompts that wait are
asked anew.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NoReturn
from weakref import WeakValueDictionary

from areal.base.errors import BackendError, BackendTimeout, UpstreamBudget, UpstreamLimit
from areal.rollout.rewards.case import Case
from areal.rollout.rewards.parsers import Reading
from areal.rollout.rewards.prompts import Asking
from areal.rollout.rewards.source import Away, Crowded, Hopeless, Limited, Rewards, Spent, Unreadable
from areal.web.client import JsonClient, UnexpectedAnswer, reason_of

PATH = "/v1/chat/completions"
LONGEST_WAIT_S = 60.0  # that a limit of the gateway is granted before it is asked again
PROBE_S = 30.0  # longest wait for the answer to a question that asks for a word
REFUSED = (400, 413, 422)  # what is wrong with the request itself
WRONG = {
    401: "check api_gateway.api_key, and what the provider allows this key",
    403: "check api_gateway.api_key, and what the provider allows this key",
    402: "top up the account at the channel's provider",
    404: "check its model_id in model_routing, and api_gateway.base_url",
}
LOOK = "the [taotoken] lines of gateway.log tell more"


class ModelSource:
    """Source. `name` is "role (model_id)"."""

    has_probe = True

    def __init__(
        self,
        client: JsonClient,
        role: str,
        model_id: str,
        asking: Asking,
        reading: Reading,
        *,
        timeout_s: float,
        cache_size: int,
    ) -> None:
        self.name = f"{role} ({model_id})"
        self._client, self._role = client, role
        self._asking, self._reading = asking, reading
        self._timeout_s = timeout_s
        self._known: OrderedDict[bytes, list[float]] = OrderedDict()
        self._most_known = cache_size
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    async def rewards(self, cases: Sequence[Case]) -> list[Rewards]:
        if len(cases) == 1 and self._asking.alone is not None:  # an evaluation, or the only answer of a group
            [case] = cases
            [reward] = await self._scores(self._asking.one(case), lambda text: [self._reading.one(text)])
            return [{None: reward}]
        prompt, order = self._asking.compared(cases)
        scores = await self._scores(prompt, lambda text: self._reading.several(text, len(cases)))
        found: dict[int, float] = dict(zip(order, scores, strict=True))
        return [{None: found[number]} for number in range(len(cases))]

    async def probe(self, case: Case | None) -> None:
        question = {"role": "user", "content": "Reply with the word ok."}
        body = {"model": self._role, "messages": [question], "max_tokens": 16}
        try:
            await self._post(body, min(PROBE_S, self._timeout_s))
        except Hopeless:  # it does not like the question, so it is there
            return

    async def _scores(self, prompt: str, read: Callable[[str], list[float]]) -> list[float]:
        key = hashlib.sha256(prompt.encode()).digest()
        async with self._locks.setdefault(key, asyncio.Lock()) if self._most_known else asyncio.Lock():
            if (known := self._known.get(key)) is not None:
                self._known.move_to_end(key)
                return known
            answer = await self._post(
                {"model": self._role, "messages": [{"role": "user", "content": prompt}]}, self._timeout_s
            )
            scores = read(_text(answer))
            if self._most_known:
                self._known[key] = scores
                if len(self._known) > self._most_known:
                    self._known.popitem(last=False)
            return scores

    async def _post(self, body: dict[str, Any], timeout_s: float) -> Any:
        """The decoded answer. Raises Away, Limited, or Hopeless where this request was refused."""
        try:
            return await self._client.post(PATH, body, timeout_s=timeout_s)
        except UnexpectedAnswer as error:
            if error.answered in REFUSED:
                raise Hopeless(f"it was refused: {error}") from error
            if error.answered == UpstreamLimit.status:
                self._raise_limit(error)
            wrong = WRONG.get(error.answered)
            raise Away(str(error), wrong or LOOK, wrong=wrong is not None) from error
        except BackendTimeout as error:
            raise Away(
                f"no answer within {timeout_s:g} s", f"raise rollout.reward.timeout_seconds if it is only slow; {LOOK}"
            ) from error
        except BackendError as error:
            raise Away(str(error), LOOK) from error

    def _raise_limit(self, error: UnexpectedAnswer) -> NoReturn:
        """A 429: of the gateway itself, or the provider's own, which has been tried again there."""
        wait_s = min(error.wait_s or 1.0, LONGEST_WAIT_S)
        if error.error_code == UpstreamBudget.code:
            raise Spent(reason_of(error.body)) from error
        if error.error_code == UpstreamLimit.code:
            raise Limited(reason_of(error.body), wait_s) from error
        raise Crowded(reason_of(error.body), wait_s) from error


def _text(answer: Any) -> str:
    """What it said. Raises Unreadable for an answer without text."""
    match answer:
        case {"choices": [{"message": {"content": str(text)}, **choice}, *_]} if text.strip():
            if choice.get("finish_reason") == "length":
                raise Unreadable("the answer was cut off; raise max_tokens of its route in model_routing")
            return text
        case {"choices": [{"finish_reason": "length"}, *_]}:
            raise Unreadable(
                "the answer was cut off before its first word; raise max_tokens of its route in model_routing"
            )
    raise Unreadable("the answer has no text")
