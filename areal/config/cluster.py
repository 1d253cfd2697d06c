"""Where processes run and where the run's files lie (`cluster`, `scheduler`)."""

from __future__ import annotations

from typing import Literal

from areal.config.section import Section

SchedulerName = Literal["local", "slurm", "ray"]


class ClusterConfig(Section):
    fileroot: str = "./runs"
    """Folder of all runs: `<fileroot>/<experiment_name>/<trial_name>`; the key-signing secret lies here too (mode 0600)."""


class SchedulerConfig(Section):
    type: SchedulerName = "local"
    """What starts the processes of a run."""
    startup_timeout_seconds: float = 300.0
    """Seconds a child process may take until it reports ready; loading a large model from slow disks needs more."""
