"""An agent of pydantic-ai with one tool. Each line of stdin is a task."""

import asyncio
import json
import sys

from pydantic_ai import Agent
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


def model_of(dialect: str, base_url: str, api_key: str) -> Model:
    if dialect == "messages":
        return AnthropicModel("default", provider=AnthropicProvider(base_url=base_url, api_key=api_key))
    kind = OpenAIResponsesModel if dialect == "responses" else OpenAIChatModel
    return kind("default", provider=OpenAIProvider(base_url=f"{base_url}/v1", api_key=api_key))


async def play(dialect: str, stream: bool, base_url: str, api_key: str, prompt: str) -> dict[str, object]:
    agent = Agent(model_of(dialect, base_url, api_key), instructions="You are terse.")
    ran: list[str] = []

    @agent.tool_plain
    def sh(command: str) -> str:
        """Run a shell command."""
        ran.append(f"ran {command}")
        return ran[-1]

    chunks = 0
    if stream:
        async with agent.run_stream_events(prompt) as events:
            async for event in events:
                chunks += event.event_kind == "part_delta"
                if event.event_kind == "agent_run_result":
                    final = event.result.output
    else:
        final = (await agent.run(prompt)).output
    return {"final": final, "results": ran, "chunks": chunks}


async def main() -> None:
    for line in sys.stdin:
        print(json.dumps(await play(**json.loads(line))), flush=True)


asyncio.run(main())
