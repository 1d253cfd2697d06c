"""Your own agent, on any OpenAI client: a tool loop that streams, and the four calls around it that make it train.

    python examples/own_agent/agent.py http://127.0.0.1:8090 [--admin-key K] [--episodes 100]

The agent is `answer`: what you would write for any OpenAI-compatible server. `episode` is what training adds to it.
"""

import argparse
import json
import random
import sys
import time
from typing import Any

import requests
from openai import APIError, OpenAI

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
            "required": ["x", "y"],
        },
    },
}


def answer(client: OpenAI, question: str, turns: int = 4) -> str:
    """Ask, run the tools that the model calls, until it answers."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(turns):
        reply: dict[str, Any] = {"role": "assistant", "content": ""}
        for chunk in client.chat.completions.create(
            model="default", messages=messages, tools=[TOOL], max_tokens=128, stream=True
        ):
            for choice in chunk.choices:
                fold(reply, choice.delta)
                print(choice.delta.content or "", end="", flush=True)
        print()
        messages.append(reply)
        if "tool_calls" not in reply:
            break
        for call in reply["tool_calls"]:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": run(call["function"])})
    return str(reply["content"])


def fold(reply: dict[str, Any], delta: Any) -> None:
    """Add a piece of a streamed answer to the whole one."""
    reply["content"] += delta.content or ""
    for piece in delta.tool_calls or ():
        calls = reply.setdefault("tool_calls", [])
        if piece.index == len(calls):
            calls.append(
                {"id": piece.id, "type": "function", "function": {"name": piece.function.name, "arguments": ""}}
            )
        calls[piece.index]["function"]["arguments"] += piece.function.arguments or ""


def run(function: dict[str, str]) -> str:
    """The tool's result; a call that makes no sense is told so, and the model may try again."""
    try:
        given = json.loads(function["arguments"])
        return str(given["x"] + given["y"])
    except (ValueError, KeyError, TypeError) as error:
        return f"error: add needs x and y, two numbers ({error})"


def episode(url: str, admin_key: str, x: int, y: int) -> float:
    """One session: start it, let the agent work under its key, reward it, end it."""
    session = post(url, "/rl/start_session", admin_key, {"task_id": f"{x}+{y}"})
    client = OpenAI(base_url=f"{url}/v1", api_key=session["api_key"])
    said = answer(client, f"What is {x} + {y}? Use the tool, then reply with the number.")
    reward = float(said.split()[-1:] == [str(x + y)])
    post(url, "/rl/set_reward", session["api_key"], {"reward": reward})
    post(url, "/rl/end_session", session["api_key"], {})
    return reward


def post(url: str, path: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
    """A call of the service. 429: training has to catch up, so wait as long as the answer says."""
    while True:
        response = requests.post(url + path, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60)
        if response.status_code == 429:
            time.sleep(float(response.headers["Retry-After"]))
            continue
        said: dict[str, Any] = response.json()
        if response.status_code != 200:
            sys.exit(f"failed: {said['error']['message']}")
        return said


def main() -> None:
    parser = argparse.ArgumentParser(description="Play episodes of an agent of one's own.")
    parser.add_argument("url", help="the gateway, for example http://127.0.0.1:8090")
    parser.add_argument("--admin-key", default="areal-admin-key")
    parser.add_argument("--episodes", type=int, default=1000)
    args = parser.parse_args()
    dice = random.Random(1)
    try:
        for number in range(args.episodes):
            x, y = dice.randint(2, 20), dice.randint(2, 20)
            reward = episode(args.url.rstrip("/"), args.admin_key, x, y)
            print(f"episode {number}: {x} + {y}, reward {reward:g}")
    except (requests.ConnectionError, APIError) as error:
        sys.exit(f"the service does not answer any more: {error}")


if __name__ == "__main__":
    main()
