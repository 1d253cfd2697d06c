"""Agents that go on by themselves whatever dies, and write down what they saw: `python -m tests.faults.client --help`.

A process with several threads. Two threads at a time share their tasks, so that a group of two sessions fills. Each session is a few turns
through the official `openai` SDK, some of them streamed, rewards by name and without one, set again now and then; then its end, or the
refresh of its key for the next task. Some wait between two turns, long enough to outlive several deaths. What is refused for now (502, 503,
429, a connection that breaks, a stream without its end) is tried again until it is done; the journal (journal.py) has the rest.
With the file --stop there, the agents finish what they have begun, fill the groups, and the process ends.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import openai
import requests
from openai import OpenAI

from tests.faults.journal import Journal

FOR_NOW = {408, 409, 429, 502, 503, 504}
PATIENCE_S = 600.0  # of one request; far more than several starts of the run take on a busy machine
LONGEST_PAUSE_S = 1.0  # agents in a hurry: `Retry-After` is heard up to here
TOKENS = 24
# The SDK stands on httpx or on httpx2, according to its version, and lets the errors of a broken stream through.
BROKEN: type[Exception] = sys.modules[openai.DefaultHttpxClient.__mro__[1].__module__.partition(".")[0]].HTTPError


class Unfinished(Exception):
    """A stream that ended and had not said how the answer ends."""


class Refused(Exception):
    """An answer that trying again cannot change; the agent gives this session up."""


class Pair:
    """Two threads that play the same tasks, one session of each task every."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.begun = 0  # tasks that either has begun


class Agent(threading.Thread):
    """One thread; `number` is its place in the pair."""

    def __init__(self, pair: Pair, number: int, url: str, admin: str, journal: Journal, stop: Path, seed: str) -> None:
        super().__init__(name=f"{pair.name}.{number}")
        self.pair, self.url, self.admin, self.journal, self.stop = pair, url, admin, journal, stop
        self.random = random.Random(f"{seed}.{self.name}")
        self.http = requests.Session()
        self.http.trust_env = False
        self.request = ""  # of the session at hand
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.failure = error
            raise

    def _work(self) -> None:
        done, key, after = 0, "", ""
        while not self.stop.exists() or done < self.pair.begun:
            self.pair.begun = max(self.pair.begun, done + 1)
            self.request = f"{self.name}.{done}"
            try:
                key = self._start(f"{self.pair.name}.{done}", key, after)
                self._play(key)
                key, after = self._leave(key)
            except Refused:
                key, after = "", ""
            done += 1

    def _start(self, task: str, key: str, after: str) -> str:
        """A session of its own, or in the place of the one that has `key`."""
        self._write("starting", task=task, after=after)
        body = {"task_id": task, "request_id": self.request, "api_key": key or None}
        started = self._post("/rl/start_session", body, self.admin)
        self._write("started", session=started["session_id"], key=started["api_key"], after=after)
        return str(started["api_key"])

    def _play(self, key: str) -> None:
        messages = [{"role": "user", "content": self._question()}]
        turns = self.random.randint(1, 3)
        http = openai.DefaultHttpxClient(trust_env=False, event_hooks={"request": [lambda _: self._write("sent")]})
        with OpenAI(base_url=f"{self.url}/v1", api_key=key, timeout=60.0, http_client=http) as sdk:
            for call in range(turns):
                answered, text = self._persist(partial(self._ask, sdk, messages, call))
                messages += [
                    {"role": "assistant", "content": text},
                    {"role": "user", "content": self._question()},
                ]
                if call == turns - 1 or self.random.random() < 0.4:
                    self._reward(key, answered)
                if call < turns - 1 and self.random.random() < 0.15:
                    self._rest(self.random.uniform(3, 25))

    def _question(self) -> str:
        return f"{self.random.randint(0, 9)}+{self.random.randint(0, 9)}="

    def _ask(self, sdk: OpenAI, messages: list[dict[str, Any]], call: int) -> tuple[str, str]:
        """One model call. Returns the answer's id and text, once it is written down."""
        self._write("calling", call=call)
        options: dict[str, Any] = {"model": "default", "messages": messages, "logprobs": True, "max_tokens": TOKENS}
        if self.random.random() < 0.5:
            answer = sdk.chat.completions.create(**options)
            choice = answer.choices[0]
            tokens = choice.logprobs.content if choice.logprobs and choice.logprobs.content else []
            name, text, finish = answer.id, choice.message.content or "", choice.finish_reason
        else:
            name, text, tokens, finish = self._listen(sdk.chat.completions.create(stream=True, **options), call)
        shown = {"tokens": [one.token for one in tokens], "logprobs": [one.logprob for one in tokens]}
        self._write("answered", call=call, id=name, text=text, finish=finish, **shown)
        return name, text

    def _listen(self, stream: Any, call: int) -> tuple[str, str, list[Any], str]:
        name, text, tokens, finish = "", "", [], ""
        try:
            for chunk in stream:
                if not name:
                    name = chunk.id
                    self._write("streaming", call=call, id=name)
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    tokens += choice.logprobs.content if choice.logprobs and choice.logprobs.content else []
                    finish = choice.finish_reason or finish
        except (openai.APIError, BROKEN):
            if not finish:  # an answer that has said how it ended is whole, whatever becomes of its connection
                raise
        if not finish:
            raise Unfinished("the stream ended without its end")
        return name, text, tokens, finish

    def _reward(self, key: str, answer: str) -> None:
        for _ in range(1 + (self.random.random() < 0.2)):
            named = answer if self.random.random() < 0.5 else None
            value = round(self.random.uniform(-1, 1), 3)
            self._write("rewarding", id=answer, value=value)
            told = self._post("/rl/set_reward", {"reward": value, "interaction_id": named}, key)
            self._write("rewarded", id=told["interaction_id"], value=told["reward"])

    def _leave(self, key: str) -> tuple[str, str]:
        """End the session; or keep it, for the next to take its place: then its key and its request id."""
        if self.random.random() < 0.15 and not self.stop.exists():
            return key, self.request
        for _ in range(1 + (self.random.random() < 0.2)):  # some say it twice
            self._write("ending")
            told = self._post("/rl/end_session", {}, key)
            self._write("ended", count=told["interaction_count"])
        return "", ""

    def _post(self, path: str, body: dict[str, Any], key: str) -> Any:
        def once() -> Any:
            answer = self.http.post(self.url + path, json=body, headers={"x-api-key": key}, timeout=60)
            if answer.status_code != 200:
                raise requests.HTTPError(answer.text, response=answer)
            return answer.json()

        return self._persist(once)

    def _persist(self, work: Callable[[], Any]) -> Any:
        """The result of `work`, tried again as long as the answer says that this may help."""
        said, until = "", time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            try:
                return work()
            except (requests.HTTPError, openai.APIStatusError) as error:
                status, said = error.response.status_code, f"{error.response.status_code}: {error}"
                if status == 500:
                    self._write("strange", said=said)
                elif status not in FOR_NOW:
                    break
                pause = float(error.response.headers.get("retry-after", 0.3))
            except (requests.RequestException, openai.APIError, BROKEN, Unfinished) as error:
                said, pause = repr(error), 0.3
            self._write("broke", error=said)
            time.sleep(min(pause, LONGEST_PAUSE_S) * self.random.uniform(0.5, 1))
        self._write("refused", said=said)
        raise Refused(said)

    def _rest(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.stop.exists():
            time.sleep(0.2)

    def _write(self, what: str, **facts: Any) -> None:
        self.journal.write(what, request=self.request, **facts)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.client", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument("--url", required=True, help="of the gateway")
    parser.add_argument("--admin", required=True, help="the admin key")
    parser.add_argument("--journal", type=Path, required=True, help="a file; its name is the client's name")
    parser.add_argument("--stop", type=Path, required=True, help="a file that tells it to finish once it is there")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of agents; default 3")
    parser.add_argument("--seed", default="0")
    options = parser.parse_args(words)
    journal, name = Journal(options.journal), options.journal.stem
    pairs = [Pair(f"{name}.{k}") for k in range(options.pairs)]
    agents = [
        Agent(pair, number, options.url, options.admin, journal, options.stop, options.seed)
        for pair in pairs
        for number in (0, 1)
    ]
    for agent in agents:
        agent.start()
    for agent in agents:
        agent.join()
    return 1 if any(agent.failure for agent in agents) else 0


if __name__ == "__main__":
    sys.exit(main())
