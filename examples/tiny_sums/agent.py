"""One-digit sums for the tiny net of configs/tiny.yaml: the answer is two digits and a stop."""

from typing import Any

from openai import AsyncOpenAI


class TinySums:
    """One question, one answer; 1 if it is exactly right and ends by itself."""

    def __init__(self) -> None:
        self.client = AsyncOpenAI(api_key="of each session", timeout=300)  # one connection pool for all sessions

    async def run(self, task: dict[str, Any], *, base_url: str, api_key: str) -> float:
        question = f"{task['x']}+{task['y']}="
        client = self.client.with_options(base_url=base_url, api_key=api_key)
        answer = await client.chat.completions.create(model="default", messages=[{"role": "user", "content": question}])
        choice = answer.choices[0]
        right = f"{task['x'] + task['y']:02d}"
        return float(choice.finish_reason == "stop" and choice.message.content == right)
