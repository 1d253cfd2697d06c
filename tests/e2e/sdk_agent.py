"""An agent that knows nothing of areal but AGENT_CONFIG: several conversations at once through the OpenAI SDK, until it is ended.

    python sdk_agent.py --at-once 16 [--end-after 2]        # in the folder of agent_config.py; OPENAI_BASE_URL replaces its address

Each conversation is new by its first message and goes on for max_turns, which is when its session ends by itself; --end-after ends it
earlier, as a program does that knows when a task is done. What the service says while it starts or ends is no reason to give up.
"""

import argparse
import os
import sys
import threading

sys.path.insert(0, os.getcwd())

import requests
from openai import APIConnectionError, APIStatusError, OpenAI

from agent_config import AGENT_CONFIG

URL = os.environ.get("OPENAI_BASE_URL", AGENT_CONFIG["model_base_url"])


def converse(client: OpenAI, name: str, number: int, turns: int, end: bool) -> None:
    messages = [{"role": "user", "content": f"{name} {number}: {number % 10}+{number // 10 % 10}="}]
    for turn in range(turns):
        answer = client.chat.completions.create(model=AGENT_CONFIG["model_name"], messages=messages, max_tokens=4)
        said = answer.choices[0].message.content or "?"
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"and {turn}+{turn}="}]
    if end:
        key = {"authorization": f"Bearer {AGENT_CONFIG['api_key']}"}
        base = URL.removesuffix("/gateway/v1")
        requests.post(
            f"{base}/rl/end_session", json={"interaction_id": answer.id}, headers=key, timeout=60
        ).raise_for_status()


def play(name: str, turns: int, end: bool, gone: threading.Event) -> None:
    client = OpenAI(base_url=URL, api_key=AGENT_CONFIG["api_key"], max_retries=5, timeout=600)
    number = 0
    while not gone.is_set():
        try:
            converse(client, name, number, turns, end)
        except (APIConnectionError, APIStatusError, requests.RequestException) as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            gone.wait(0.5)
        number += 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--end-after", type=int)
    options = parser.parse_args()
    turns, gone = options.end_after or AGENT_CONFIG["max_turns"], threading.Event()
    for k in range(options.at_once):
        threading.Thread(
            target=play, args=(f"agent {k}", turns, options.end_after is not None, gone), daemon=True
        ).start()
    gone.wait()
