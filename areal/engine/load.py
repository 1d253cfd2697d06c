"""Which net a rank trains or asks: by backend (`fsdp` any of transformers', `archon` our own) and role (log-probs or values).

    net = load_net(settings, world)

Used by engine.py. A table of two by two; each loader refuses with a sentence what it cannot train.
"""

from __future__ import annotations

from areal.config.backend_spec import parse_backend
from areal.engine.archon import load_archon
from areal.engine.critic import load_critic
from areal.engine.model import load_policy
from areal.engine.net import Net
from areal.engine.parallel.dims import check_layout
from areal.engine.parallel.world import World
from areal.engine.settings import EngineSettings


def load_net(settings: EngineSettings, world: World) -> Net:
    """To be cut, and filled then, where the world has several processes.

    Raises ConfigError naming the folder where its model cannot be trained, or the sizes that would fit it where the layout does not."""
    check_layout(settings)
    critic = settings.role == "critic"
    if parse_backend(settings.backend).name == "archon":
        chunks = settings.pipeline_chunks if world.size("p") > 1 else 1
        return load_archon(settings.model_dir, world, dtype=settings.dtype, critic=critic, chunks=chunks)
    load = load_critic if critic else load_policy
    return load(settings.model_dir, dtype=settings.dtype, world=world)
