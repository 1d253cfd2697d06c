"""An agent of the OpenAI Agents SDK with one tool. Each line of stdin is a task."""

import asyncio
import json
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)


async def play(dialect: str, stream: bool, base_url: str, api_key: str, prompt: str) -> dict[str, object]:
    ran: list[str] = []

    @function_tool
    def sh(command: str) -> str:
        """Run a shell command."""
        ran.append(f"ran {command}")
        return ran[-1]

    client = AsyncOpenAI(base_url=f"{base_url}/v1", api_key=api_key)
    kind = OpenAIResponsesModel if dialect == "responses" else OpenAIChatCompletionsModel
    agent = Agent(name="worker", instructions="You are terse.", model=kind("default", openai_client=client), tools=[sh])
    chunks = 0
    if stream:
        result = Runner.run_streamed(agent, prompt)
        async for event in result.stream_events():
            chunks += event.type == "raw_response_event"
    else:
        result = await Runner.run(agent, prompt)
    return {"final": result.final_output, "results": ran, "chunks": chunks}


for line in sys.stdin:
    print(json.dumps(asyncio.run(play(**json.loads(line)))), flush=True)
