"""What a run folder says about a run that its store does not: name, turn discount, and the tokenizer of its tokens.

    facts = RunFacts.of(Path("runs/areal/trial"))
    facts.tokenizer            # None where it cannot be loaded: the page then shows token ids

Everything here is optional and read once, at start; a run folder that holds nothing but a store is shown as well.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from areal.base.errors import ConfigError
from areal.chat.base import Tokenizer
from areal.chat.scripted import scripted_renderer
from areal.cluster.run_folder import RunFolder
from areal.config.recorded import Recorded
from areal.models.tokenizer import HfTokenizer

_log = logging.getLogger("areal.dashboard")


@dataclass(frozen=True, slots=True)
class RunFacts:
    """turn_discount, reward_clip: how the page makes credit of rewards, the run's own (rollout.agent). run_id: whose metrics are shown,
    where several runs log into one folder; None shows the latest."""

    name: str = "run"
    turn_discount: float = 1.0
    reward_clip: float | None = None
    tokenizer: Tokenizer | None = None
    run_id: str | None = None

    @classmethod
    def of(cls, run: Path, tokenizer_folder: Path | None = None) -> RunFacts:
        """Read config.yaml and the workers' specs of a run folder. Raises ConfigError for a tokenizer that was asked for
        and cannot be loaded; one that was only found is left out with a warning."""
        config = Recorded.of(run / "config.yaml")
        discount = config.number("rollout.agent.turn_discount")
        clip = config.number("rollout.agent.reward_clip")
        return cls(
            name=f"{run.parent.name}/{run.name}",
            turn_discount=1.0 if discount is None else discount,
            reward_clip=clip,
            tokenizer=HfTokenizer.load(tokenizer_folder) if tokenizer_folder else _find_tokenizer(run, config),
            run_id=RunFolder.existing(run).identity,
        )


def _find_tokenizer(run: Path, config: Recorded) -> Tokenizer | None:
    backend = config.text("rollout.backend") or ""
    try:
        if backend.startswith("scripted") and not config.text("actor.path"):
            return scripted_renderer(config.text("rollout.scripted.path") or "").tokenizer
        for spec in sorted((run / "processes").glob("*.spec.json")):
            folder = json.loads(spec.read_bytes()).get("model_dir")
            if isinstance(folder, str) and folder:
                return HfTokenizer.load(folder)
    except (ConfigError, OSError, ValueError) as error:
        _log.warning("token texts are not shown, only ids: %s", error)
    return None
