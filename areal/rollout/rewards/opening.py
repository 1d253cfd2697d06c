"""Config -> the run's scorer with its source, where the run rewards by itself.

    async with scoring(config, store, gate, tasks, gateway_url=url, channel_token=token, logs=folder.logs) as scorer: ...   # None: clients reward

A session that waits from an earlier life, when the configuration has gone back to clients, will get no reward from anybody: it is dropped
as reward_failed and said. Used by assemble.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from areal.base.logs import warn
from areal.cluster.program import clean_environment
from areal.config.rewarded import MODELS
from areal.config.run import RunConfig
from areal.inference.upstream.client import MOST_BACKOFF_S
from areal.rollout.agent_output import Spoken, open_agent_log
from areal.rollout.datasets import Task
from areal.rollout.pool import ProcessPool
from areal.rollout.rewards.function_source import FunctionSource
from areal.rollout.rewards.model_source import ModelSource
from areal.rollout.rewards.parsers import Reading
from areal.rollout.rewards.prompts import Asking
from areal.rollout.rewards.scorer import Scorer, Terms
from areal.rollout.rewards.source import Source
from areal.rollout.rewards.tasks import KnownTasks
from areal.rollout.staleness import StalenessGate
from areal.store.base import Store
from areal.web.client import JsonClient

FUNCTION_S = 60.0


@asynccontextmanager
async def scoring(
    config: RunConfig,
    store: Store,
    gate: StalenessGate,
    tasks: Iterable[Task],
    *,
    gateway_url: str,
    channel_token: str,
    logs: Path,
) -> AsyncIterator[Scorer | None]:
    """logs: where rewards.log goes, what a function prints. Raises ConfigError for a function that cannot be loaded."""
    if config.rollout.agent.reward_source == "client":
        await _give_up_what_waits(store)
        yield None
        return
    async with AsyncExitStack() as stack:
        source = await _source(stack, config, gateway_url, channel_token, logs)
        scorer = Scorer(
            store, gate, source, KnownTasks(tasks), Terms.of(config), say=lambda text: warn("Rewards", text)
        )
        yield await stack.enter_async_context(scorer)


def timeout_of(config: RunConfig) -> float:
    """Seconds that one call of the source may take."""
    if (own := config.rollout.reward.timeout_seconds) is not None:
        return own
    if config.rollout.agent.reward_source not in MODELS:
        return FUNCTION_S
    channel, route = config.api_gateway, getattr(config.model_routing, config.rollout.agent.reward_source, None)
    assert channel is not None
    assert route is not None  # rewarded.py
    pauses = channel.max_retries * max(channel.retry_after_limit_seconds, MOST_BACKOFF_S)
    attempts = (channel.max_retries + 1) * (route.timeout or channel.timeout)
    return min(attempts + pauses, channel.deadline_seconds) + channel.queue_timeout_seconds


async def _source(stack: AsyncExitStack, config: RunConfig, gateway_url: str, channel_token: str, logs: Path) -> Source:
    reward, role, reading = config.rollout.reward, config.rollout.agent.reward_source, Reading.of(config)
    if role in MODELS:
        client = await stack.enter_async_context(JsonClient(gateway_url, bearer=channel_token))
        return ModelSource(
            client,
            role,
            getattr(config.model_routing, role).model_id,
            Asking.of(config),
            reading,
            timeout_s=timeout_of(config),
            cache_size=reward.cache_size,
        )
    assert reward.path is not None
    stack.enter_context(open_agent_log(logs / "rewards.log"))
    pool = ProcessPool(
        reward.path,
        key="rollout.reward.path",
        size=reward.concurrency,
        timeout_s=timeout_of(config),
        memory_mb=reward.memory_mb,
        environment=clean_environment(reward.environment),
        say=Spoken("-").line,
    )
    return FunctionSource(await stack.enter_async_context(pool), reward.path, reading)


async def _give_up_what_waits(store: Store) -> None:
    waiting = [one.session.id for one in await store.rewards.waiting()]
    if waiting:
        await store.rewards.write(dict.fromkeys(waiting))
        warn(
            "Rewards",
            f"{len(waiting)} sessions waited for a reward from the reward source that the run had before; nobody gives it now "
            "(rollout.agent.reward_source=client), so they are dropped (reward_failed)",
        )
