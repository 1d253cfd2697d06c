"""Plays tasks with any agent against a running service, many sessions at once: start_session -> agent -> reward -> end_session.

    python -m examples.play http://127.0.0.1:8090 --agent examples.langchain.agent:chat \\
        --tasks examples/langchain/tasks.jsonl --samples 4

The agent is any object with `async run(task, *, base_url, api_key)` that returns its reward: a number for its last answer, or
{id of an answer: number}. Tasks are the lines of a JSONL file, or what `module:function` yields for a seed; each is tried by
`--samples` sessions of one task id, which the service compares with each other. Rewards are set with the admin key, so that
a policy with a shell, which can read its own key, cannot be the one who sets them (rollout.agent.reward_key: admin).

429 means that training has to catch up: wait as long as the answer says. The play ends with the service.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import sys
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import aiohttp

Task = dict[str, Any]


class Service:
    """The calls around an agent's own."""

    def __init__(self, http: aiohttp.ClientSession, url: str, admin_key: str) -> None:
        self.http, self.url, self.admin_key = http, url.rstrip("/"), admin_key

    async def call(self, path: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST; waits and tries again on 429. Raises aiohttp's error, with the service's own words, for anything else."""
        while True:
            async with self.http.post(self.url + path, json=body, headers={"Authorization": f"Bearer {key}"}) as answer:
                if answer.status == 429:
                    await asyncio.sleep(float(answer.headers.get("Retry-After", 1)))
                    continue
                said = await answer.json()
                if answer.status != 200:
                    message = said["error"]["message"]
                    raise aiohttp.ClientResponseError(answer.request_info, (), status=answer.status, message=message)
                return said  # type: ignore[no-any-return]

    async def episode(self, agent: Any, task: Task) -> None:
        """One session of one task."""
        session = await self.call("/rl/start_session", self.admin_key, {"task_id": task["task_id"]})
        key = session["api_key"]
        rewards = await agent.run(task, base_url=f"{self.url}/v1", api_key=key)
        for answer, reward in (rewards if isinstance(rewards, dict) else {None: rewards}).items():
            body = {"session_id": session["session_id"], "interaction_id": answer, "reward": reward}
            await self.call("/rl/set_reward", self.admin_key, body)
        await self.call("/rl/end_session", key, {})

    async def ends(self, failure: BaseException) -> bool:
        """Whether a failure is but the end of the service: it takes no more sessions, or is gone in a moment."""
        if isinstance(failure, aiohttp.ClientResponseError) and failure.status in (400, 401, 403, 404, 503):
            return failure.status == 503  # draining; anything else is a refusal
        for _ in range(10):
            try:
                async with self.http.get(f"{self.url}/health"):
                    await asyncio.sleep(1)
            except aiohttp.ClientConnectionError:
                return True
        return False


async def play(
    url: str, admin_key: str, agent: Any, tasks: Iterator[Task], samples: int, groups: int
) -> tuple[int, BaseException | None]:
    """Keep `groups` tasks of `samples` sessions going. Returns how many were played to their end, and what stopped the play
    if that was neither the end of the tasks nor of the service."""
    played, failures = 0, []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=900)) as http:
        service = Service(http, url, admin_key)

        async def player() -> None:
            nonlocal played
            for task in tasks:
                runs = (service.episode(agent, task) for _ in range(samples))
                results = await asyncio.gather(*runs, return_exceptions=True)
                failures.extend(result for result in results if result is not None)
                if failures:
                    return
                played += 1

        await asyncio.gather(*(player() for _ in range(groups)))
        stopped = failures[0] if failures and not await service.ends(failures[0]) else None
    return played, stopped


def named(path: str) -> Any:
    """What stands at `module:attribute`; a class is made."""
    module, _, attribute = path.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    return found() if isinstance(found, type) else found


def tasks_of(source: str, seed: int) -> Iterator[Task]:
    """The lines of a file again and again, each pass under ids of its own; or what a function yields."""
    if not source.endswith(".jsonl"):
        yield from named(source)(seed)
        return
    lines = [json.loads(line) for line in Path(source).read_text(encoding="utf-8").splitlines() if line.strip()]
    for turn in count():
        yield from (task | {"task_id": f"{task['task_id']}@{turn}" if turn else task["task_id"]} for task in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Play tasks with an agent against a running service.")
    parser.add_argument("url", help="the gateway, for example http://127.0.0.1:8090")
    parser.add_argument("--agent", required=True, metavar="MODULE:NAME")
    parser.add_argument("--tasks", required=True, metavar="FILE.jsonl|MODULE:FUNCTION")
    parser.add_argument("--admin-key", default="areal-admin-key")
    parser.add_argument("--samples", type=int, default=1, help="sessions per task: gconfig.n_samples of the service")
    parser.add_argument("--groups", type=int, default=4, help="tasks at once")
    parser.add_argument("--seed", type=int, default=1, help="of tasks that a function yields")
    parser.add_argument("--limit", type=int, default=None, help="tasks to play; default: until the service ends")
    args = parser.parse_args()
    tasks = islice(tasks_of(args.tasks, args.seed), args.limit)
    try:
        agent = named(args.agent)
    except (ImportError, AttributeError, OSError) as error:
        sys.exit(f"{args.agent} cannot be made: {error}")
    played, stopped = asyncio.run(play(args.url, args.admin_key, agent, tasks, args.samples, args.groups))
    print(f"played {played} tasks")
    if stopped is not None:
        print(f"stopped: {type(stopped).__name__}: {stopped}", file=sys.stderr)
    return 0 if stopped is None else 1


if __name__ == "__main__":
    sys.exit(main())
