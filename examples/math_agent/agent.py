"""An ordinary agent on the official OpenAI SDK: adds two numbers and must answer with the number alone.

It knows nothing of areal but a base URL and a key. Half of the tasks give it a second chance: a wrong first answer is told
so and may be corrected, for part of the reward.

    reward = await MathAgent().run({"x": 7, "y": 12, "turns": 2}, base_url="http://127.0.0.1:8090", api_key="sk-sess-...")
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

from openai import AsyncOpenAI

STOPPED = 0.1  # for an answer that ends by itself; too small to be worth settling for
CORRECTED = 0.6  # for a right second answer


def sums(seed: int, low: int = 2, high: int = 20) -> Iterator[dict[str, Any]]:
    """Endless sums x+y with low <= x, y <= high; every second one allows a correction."""
    rng = random.Random(seed)
    number = 0
    while True:
        x, y = rng.randint(low, high), rng.randint(low, high)
        yield {"task_id": f"sum-{seed}-{number}", "x": x, "y": y, "turns": 1 + number % 2}
        number += 1


def score(answer: str, finished: bool, gold: int) -> float:
    """1 for the right last number in an answer that ends by itself, a little for ending at all, 0 for rambling on."""
    if not finished:
        return 0.0
    numbers = re.findall(r"\d+", answer)
    return 1.0 if numbers and int(numbers[-1]) == gold else STOPPED


class MathAgent:
    """One or two turns of chat; returns the reward of each answer by its id."""

    max_tokens = 12

    def __init__(self) -> None:
        self.client = AsyncOpenAI(api_key="of each session", timeout=600)  # one connection pool for all sessions

    async def run(self, task: dict[str, Any], *, base_url: str, api_key: str) -> dict[str, float]:
        gold = task["x"] + task["y"]
        messages: list[Any] = [
            {"role": "user", "content": f"What is {task['x']}+{task['y']}? Reply with only the number."}
        ]
        rewards: dict[str, float] = {}
        client = self.client.with_options(base_url=base_url, api_key=api_key)
        for turn in range(task["turns"]):
            answer = await client.chat.completions.create(
                model="default", messages=messages, max_tokens=self.max_tokens
            )
            choice = answer.choices[0]
            reward = score(choice.message.content or "", choice.finish_reason == "stop", gold)
            if reward == 1.0:
                rewards[answer.id] = CORRECTED if turn else 1.0
                break
            rewards[answer.id] = reward if turn + 1 == task["turns"] else reward / 2
            messages += [
                {"role": "assistant", "content": choice.message.content or ""},
                {"role": "user", "content": "That is wrong. Reply with only the right number."},
            ]
        return rewards
