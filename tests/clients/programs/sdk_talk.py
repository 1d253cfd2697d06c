"""Two turns in a protocol through its official SDK, streamed. Each line of stdin is a task.

The raw streams are read: the SDKs' helpers refuse an answer that ran into its limit, which a small model's may."""

import json
import sys
from typing import Any

from anthropic import Anthropic
from openai import OpenAI

TOKENS = 24


def chat(client: OpenAI, history: list[Any]) -> Any:
    stream = client.chat.completions.create(model="default", messages=history, max_tokens=TOKENS, stream=True)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    return [{"role": "assistant", "content": said}]


def responses(client: OpenAI, history: list[Any]) -> Any:
    stream = client.responses.create(model="default", input=history, max_output_tokens=TOKENS, stream=True)
    [final] = [event.response for event in stream if event.type in ("response.completed", "response.incomplete")]
    return [item.model_dump(exclude_none=True) for item in final.output]


def messages(client: Anthropic, history: list[Any]) -> Any:
    with client.messages.stream(model="default", messages=history, max_tokens=TOKENS) as events:
        return [{"role": "assistant", "content": events.get_final_message().content}]


for line in sys.stdin:
    task = json.loads(line)
    base, key = task["base_url"], task["api_key"]
    if task["dialect"] == "messages":
        client, ask = Anthropic(base_url=base, api_key=key), messages
    else:
        client, ask = OpenAI(base_url=f"{base}/v1", api_key=key), chat if task["dialect"] == "chat" else responses
    history: list[Any] = []
    for text in ("What is 2 + 2?", "And 3 + 3?"):
        history.append({"role": "user", "content": text})
        history += ask(client, history)
    print(json.dumps({"turns": len(history)}), flush=True)
