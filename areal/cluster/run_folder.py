"""The folder of one run: one documented layout (docs/architecture.md), everything in it 0700/0600.

    folder = RunFolder.of(config.cluster.fileroot, "my-exp", "trial-0", output_dir=None, log_dir=None)
    folder.create()
    folder.logs / "train.log", folder.store_path, folder.signing_key
    RunFolder.existing(Path("runs/my-exp/trial-0")).metrics()     # for those who look at a run later: what it logged

The lock (one run at a time) is the scheduler's. Names from configs become file names only through base/names.safe_name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from areal.base.atomic import write_atomic
from areal.base.errors import ConfigError
from areal.base.metrics import MetricsTable, read_metrics
from areal.base.names import safe_name
from areal.config.recorded import Recorded


@dataclass(frozen=True, slots=True)
class RunFolder:
    """root: of this run. fileroot: of all runs; the signing key lies there and outlives a run. logs: may lie elsewhere."""

    root: Path
    fileroot: Path
    logs: Path

    @classmethod
    def of(cls, fileroot: str, experiment: str, trial: str, output_dir: str | None, log_dir: str | None) -> RunFolder:
        """Paths are relative to the working directory; output_dir replaces <fileroot>/<experiment>/<trial>."""
        base = Path(fileroot).absolute()
        root = Path(output_dir).absolute() if output_dir else base / safe_name(experiment) / safe_name(trial)
        return cls(root, base, Path(log_dir).absolute() if log_dir else root / "logs")

    @classmethod
    def existing(cls, root: Path) -> RunFolder:
        """That of a run which has begun: where it logs stands in its own config.yaml."""
        recorded = Recorded.of(root / "config.yaml")
        fileroot = recorded.text("cluster.fileroot") or str(root.parent.parent)
        return cls.of(fileroot, root.parent.name, root.name, str(root), recorded.text("stats_logger.log_dir"))

    def metrics(self) -> MetricsTable:
        """What this run logged, and no other that logs into the same folder; empty where it has logged nothing yet."""
        try:
            return read_metrics(self.metrics_path, self.identity)
        except FileNotFoundError:
            return MetricsTable({})

    def create(self) -> None:
        """Make the folders. Raises ConfigError naming the one that cannot be made."""
        for folder in (self.fileroot, self.root, self.processes, self.checkpoints, self.logs):
            try:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            except OSError as error:
                apart = folder == self.logs and not folder.is_relative_to(self.root)
                key = "logging.log_dir" if apart else "cluster.fileroot or --output-dir"
                raise ConfigError(
                    f"cannot make {folder}: {error.strerror}; choose {key} where you may write"
                ) from error

    def run_id(self, fresh: str) -> str:
        """The id in every log header and metrics row: `fresh` on the first start, the same again on every resume."""
        if self.identity is None:
            write_atomic(self.root / "run_id", fresh.encode())
        return self.identity or fresh

    @property
    def identity(self) -> str | None:
        """The run's id; None before its first start."""
        path = self.root / "run_id"
        return path.read_text().strip() if path.exists() else None

    @property
    def processes(self) -> Path:
        return self.root / "processes"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def metrics_path(self) -> Path:
        return self.logs / "metrics.jsonl"

    @property
    def store_path(self) -> Path:
        return self.root / "store.sqlite"

    @property
    def steps(self) -> Path:
        return self.root / "steps.jsonl"

    @property
    def signing_key(self) -> Path:
        return self.fileroot / "signing.key"
