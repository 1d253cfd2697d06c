"""Plays episodes against a running service over HTTP, many at once: start_session -> chat -> set_reward -> end_session.

    python examples/math_agent/play.py http://127.0.0.1:8090 --admin-key KEY --samples 8

Every task is tried by `--samples` sessions of the same task id, which makes them one group. 429 means that training has to
catch up: wait as long as the answer says. The service going away ends the play.
"""

from __future__ import annotations

import argparse
import asyncio
from itertools import islice
from typing import Any

import aiohttp
from agent import MathAgent, sums


class Service:
    """The four calls around an agent's own chat."""

    def __init__(self, http: aiohttp.ClientSession, admin_key: str) -> None:
        self.http = http
        self.admin_key = admin_key

    async def call(self, path: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST; waits and tries again on 429. Raises aiohttp's error for anything else."""
        while True:
            async with self.http.post(path, json=body, headers={"Authorization": f"Bearer {key}"}) as answer:
                if answer.status == 429:
                    await asyncio.sleep(float(answer.headers.get("Retry-After", 1)))
                    continue
                answer.raise_for_status()
                return await answer.json()  # type: ignore[no-any-return]

    async def episode(self, url: str, agent: MathAgent, task: dict[str, Any]) -> None:
        session = await self.call("/rl/start_session", self.admin_key, {"task_id": task["task_id"]})
        key = session["api_key"]
        for interaction_id, reward in (await agent.run(task, base_url=url, api_key=key)).items():
            await self.call("/rl/set_reward", key, {"reward": reward, "interaction_id": interaction_id})
        await self.call("/rl/end_session", key, {})


async def play(url: str, admin_key: str, samples: int, groups: int, seed: int, episodes: int | None) -> int:
    """Keep `groups` groups of `samples` sessions going; returns how many groups were played to the end."""
    tasks = islice(sums(seed), episodes)
    played = 0
    stop = asyncio.Event()
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=900)) as http:
        service = Service(http, admin_key)
        agent = MathAgent()

        async def player() -> None:
            nonlocal played
            for task in tasks:
                runs = [service.episode(url, agent, task) for _ in range(samples)]
                for result in await asyncio.gather(*runs, return_exceptions=True):
                    if isinstance(result, (aiohttp.ClientConnectionError, aiohttp.ClientResponseError)):
                        stop.set()  # the service has ended, or is draining
                if stop.is_set():
                    return
                played += 1

        await asyncio.gather(*(player() for _ in range(groups)))
    return played


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("url")
    parser.add_argument("--admin-key", default="areal-admin-key")
    parser.add_argument("--samples", type=int, default=8, help="sessions per task")
    parser.add_argument("--groups", type=int, default=16, help="tasks at once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--episodes", type=int, default=None, help="tasks to play; default: until the service ends")
    args = parser.parse_args()
    played = asyncio.run(play(args.url, args.admin_key, args.samples, args.groups, args.seed, args.episodes))
    print(f"played {played} tasks")


if __name__ == "__main__":
    main()
