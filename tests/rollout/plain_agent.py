"""An agent for mode subproc as somebody might write it: a plain function on the OpenAI SDK; its tasks say what goes wrong."""

import os
import time
from typing import Any

from openai import OpenAI


class PlainAgent:
    """Asks once, then works, raises, dies or hangs."""

    def run(self, task: dict[str, Any], *, base_url: str, api_key: str) -> float:
        with OpenAI(base_url=base_url, api_key=api_key) as client:
            client.chat.completions.create(model="default", messages=[{"role": "user", "content": "Hi"}])
        print(f"does {task['does']}, with {os.environ.get('SECRET_OF_THE_RUN', 'no secret')}")
        if task["does"] == "raise":
            raise ValueError("as the task says")
        if task["does"] == "die":
            os.abort()
        if task["does"] == "hang":
            time.sleep(600)
        return 0.5
