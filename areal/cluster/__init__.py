"""Where the processes of a run live: one table of schedulers, keyed by `scheduler.type`.

    async with start_scheduler(config, folder) as scheduler:
        [process] = await scheduler.start(job)

A scheduler is one file here and one line in the table. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from areal.base.errors import ConfigError
from areal.cluster.local import LocalScheduler
from areal.cluster.program import PASSED_ON
from areal.cluster.run_folder import RunFolder
from areal.cluster.scheduler import Scheduler
from areal.config.run import RunConfig

SCHEDULERS: dict[str, Callable[[RunFolder, Collection[str]], Scheduler]] = {
    "local": lambda folder, hidden: LocalScheduler(folder.root, folder.logs, hidden=hidden),
}


def start_scheduler(config: RunConfig, folder: RunFolder) -> Scheduler:
    """The scheduler that `scheduler.type` names, to be entered with `async with`. Raises ConfigError for one that cannot run."""
    name = config.scheduler.type
    if name not in SCHEDULERS:
        raise ConfigError(
            f"scheduler.type={name} cannot be used yet: this version starts all processes on one host; "
            f"choose one of {', '.join(SCHEDULERS)}"
        )
    return SCHEDULERS[name](folder, hidden_variables(config))


def hidden_variables(config: RunConfig) -> frozenset[str]:
    """Variables that processes of the run do not inherit: those that its keys were read from. They get what they need by their specs, and
    workers run agents' code. What rollout.agent.process.environment names is for agents and stays."""
    return config.secret_variables - {*config.rollout.agent.process.environment, *PASSED_ON}
