"""The agent of the real cells: one call, answered by the line of the script that its task names."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI


class Timed:
    """Asks once; the answer takes as long as the script says."""

    def __init__(self) -> None:
        self.client = AsyncOpenAI(api_key="of each session", timeout=600, max_retries=0)

    async def run(self, task: dict[str, Any], *, base_url: str, api_key: str) -> float:
        client = self.client.with_options(base_url=base_url, api_key=api_key)
        await client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": f"line {task['line']}."}]
        )
        return 1.0
