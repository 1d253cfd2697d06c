"""A tool loop of one's own over the official SDKs. Each line of stdin is a task."""

import json
import sys
from typing import Any

from anthropic import Anthropic
from openai import OpenAI

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
ABOUT = "Run a shell command."


class Agent:
    """One task: what its tool ran, and how many pieces its streams came in."""

    def __init__(self, dialect: str, stream: bool, base_url: str, api_key: str, prompt: str) -> None:
        self.stream, self.prompt = stream, prompt
        self.ran: list[str] = []
        self.chunks = 0
        if dialect == "messages":
            self.anthropic = Anthropic(base_url=base_url, api_key=api_key)
        else:
            self.openai = OpenAI(base_url=f"{base_url}/v1", api_key=api_key)
        self.final = {"chat": self.chat, "responses": self.responses, "messages": self.messages}[dialect]()

    def sh(self, arguments: str | dict[str, Any]) -> str:
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
        self.ran.append(f"ran {given['command']}")
        return self.ran[-1]

    def chat(self) -> str:
        tool = {"type": "function", "function": {"name": "sh", "description": ABOUT, "parameters": SCHEMA}}
        history: list[Any] = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": self.prompt}]
        while True:
            asked: dict[str, Any] = {"model": "default", "messages": history, "tools": [tool]}
            if self.stream:
                with self.openai.chat.completions.stream(**asked) as events:
                    self.chunks += sum(1 for _ in events)
                    said = events.get_final_completion().choices[0].message
            else:
                said = self.openai.chat.completions.create(**asked).choices[0].message
            history.append(said.model_dump(exclude_none=True, exclude={"parsed"}))
            if not said.tool_calls:
                return said.content or ""
            for one in said.tool_calls:
                history.append({"role": "tool", "tool_call_id": one.id, "content": self.sh(one.function.arguments)})

    def responses(self) -> str:
        tool = {"type": "function", "name": "sh", "description": ABOUT, "parameters": SCHEMA, "strict": False}
        history: list[Any] = [{"role": "user", "content": self.prompt}]
        while True:
            asked: dict[str, Any] = {"model": "default", "input": history, "tools": [tool]}
            asked["instructions"] = "You are terse."
            if self.stream:
                with self.openai.responses.stream(**asked) as events:
                    self.chunks += sum(1 for _ in events)
                    said = events.get_final_response()
            else:
                said = self.openai.responses.create(**asked)
            history += [item.model_dump(exclude_none=True) for item in said.output]
            calls = [item for item in said.output if item.type == "function_call"]
            if not calls:
                return said.output_text
            for one in calls:
                history.append(
                    {"type": "function_call_output", "call_id": one.call_id, "output": self.sh(one.arguments)}
                )

    def messages(self) -> str:
        tool = {"name": "sh", "description": ABOUT, "input_schema": SCHEMA}
        history: list[Any] = [{"role": "user", "content": self.prompt}]
        while True:
            asked: dict[str, Any] = {"model": "default", "max_tokens": 1024, "messages": history, "tools": [tool]}
            asked["system"] = "You are terse."
            if self.stream:
                with self.anthropic.messages.stream(**asked) as events:
                    self.chunks += sum(1 for _ in events)
                    said = events.get_final_message()
            else:
                said = self.anthropic.messages.create(**asked)
            history.append({"role": "assistant", "content": said.content})
            calls = [block for block in said.content if block.type == "tool_use"]
            if not calls:
                return "".join(block.text for block in said.content if block.type == "text")
            results = [{"type": "tool_result", "tool_use_id": one.id, "content": self.sh(one.input)} for one in calls]
            history.append({"role": "user", "content": results})


for line in sys.stdin:
    agent = Agent(**json.loads(line))
    print(json.dumps({"final": agent.final, "results": agent.ran, "chunks": agent.chunks}), flush=True)
