"""LangChain's agent (a LangGraph graph) with one tool, as a user writes it. Each line of stdin is a task."""

import json
import sys

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def sh(command: str) -> str:
    """Run a shell command."""
    return f"ran {command}"


def play(dialect: str, stream: bool, base_url: str, api_key: str, prompt: str) -> dict[str, object]:
    if dialect == "messages":
        model = ChatAnthropic(model="default", base_url=base_url, api_key=api_key)
    else:
        by_responses = dialect == "responses"
        model = ChatOpenAI(model="default", base_url=f"{base_url}/v1", api_key=api_key, use_responses_api=by_responses)
    agent = create_agent(model, [sh], system_prompt="You are terse.")
    asked = {"messages": [("user", prompt)]}
    state: dict[str, list] = {}
    chunks = 0
    if stream:
        for kind, part in agent.stream(asked, stream_mode=["messages", "values"]):
            if kind == "values":
                state = part
            else:
                chunks += 1
    else:
        state = agent.invoke(asked)
    answers = [message.text for message in state["messages"] if message.type == "ai"]
    results = [message.content for message in state["messages"] if message.type == "tool"]
    return {"final": answers[-1], "results": results, "chunks": chunks}


for line in sys.stdin:
    print(json.dumps(play(**json.loads(line))), flush=True)
