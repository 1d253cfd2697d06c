"""A LangGraph agent as its user writes it: LangChain's own agent with a tool, as a node; a second node scores the answer."""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph


class State(MessagesState):
    """reward: of the whole conversation."""

    reward: float


@tool
def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


def score(state: State, config: RunnableConfig) -> dict[str, Any]:
    """How far the answer's letters are from the task's number: of no sense, and different for each answer."""
    said = str(state["messages"][-1].text)
    return {"reward": (sum(map(ord, said)) + config["configurable"]["task"]["wanted"]) % 101 / 100}


def build(model: Any) -> Any:
    graph = StateGraph(State)
    graph.add_node("agent", create_agent(model, [add]))
    graph.add_node("score", score)
    graph.add_edge(START, "agent")
    graph.add_edge("agent", "score")
    return graph.compile()
