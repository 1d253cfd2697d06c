"""A LangGraph agent with a tool, as LangChain makes it, in any of the three protocols; it knows of areal only a base URL and a key.

    reward = await chat.run({"question": "What is 12 * 15 + 3?", "answer": 183}, base_url="http://127.0.0.1:8090/v1", api_key=key)

`chat`, `responses` and `messages` are the same agent; the name is the protocol. `examples.langchain.agent:messages` is what
`rollout.agent.path` and `examples.play --agent` take. Needs what requirements.txt in this folder names.
"""

from __future__ import annotations

import re
from typing import Any

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError

TURNS = 5  # model calls of one task
TOKENS = 256  # most tokens of one answer


@tool
def calculate(a: float, operation: str, b: float) -> str:
    """Calculate a operation b, where the operation is one of + - * /."""
    try:
        results = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else float("nan")}
    except OverflowError:
        return "too large"
    return f"{results[operation]:g}" if operation in results else "the operation must be one of + - * /"


class CalculatorAgent:
    """Answers a question with the calculator's help; 1 if the last number of its answer is the right one."""

    def __init__(self, api: str) -> None:
        self.api = api

    async def run(self, task: dict[str, Any], *, base_url: str, api_key: str) -> float:
        agent = create_agent(self.model(base_url, api_key), [calculate])
        question = {"messages": [{"role": "user", "content": task["question"]}]}
        try:
            state = await agent.ainvoke(question, {"recursion_limit": 2 * TURNS})
        except GraphRecursionError:
            return 0.0
        numbers = re.findall(r"-?\d+(?:\.\d+)?", str(state["messages"][-1].text).replace(",", ""))
        return float(bool(numbers) and float(numbers[-1]) == float(task["answer"]))

    def model(self, base_url: str, api_key: str) -> BaseChatModel:
        if self.api == "messages":
            root = base_url.removesuffix("/v1")  # the Anthropic SDK appends /v1 itself
            return ChatAnthropic(model="default", base_url=root, api_key=api_key, max_tokens=TOKENS, timeout=600)
        return ChatOpenAI(
            model="default",
            base_url=base_url,
            api_key=api_key,
            max_tokens=TOKENS,
            timeout=600,
            use_responses_api=self.api == "responses",
        )


chat, responses, messages = (CalculatorAgent(api) for api in ("chat", "responses", "messages"))
