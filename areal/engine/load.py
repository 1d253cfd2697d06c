"""Which net a rank trains or asks: by backend (`fsdp` any of transformers', `archon` our own) and role (log-probs or values).

    net = load_net(settings, world)

Used by engine.py. A table of two by two; each loader refuses with a sentence what it cannot train.
"""

from __future__ import annotations

from areal.base.errors import ConfigError
from areal.config.backend_spec import parse_backend
from areal.engine.archon import load_archon
from areal.engine.critic import load_critic
from areal.engine.lora import load_adapted
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
    archon = parse_backend(settings.backend).name == "archon"
    if settings.lora is not None and (archon or critic):
        raise ConfigError(
            f"actor.lora: {'a critic' if critic else settings.backend} has no adapter; use fsdp: for the actor"
        )
    if archon:
        chunks = settings.pipeline_chunks if world.size("p") > 1 else 1
        return load_archon(settings.model_dir, world, dtype=settings.dtype, critic=critic, chunks=chunks)
    if settings.lora is not None:
        return load_adapted(settings.model_dir, settings.lora, dtype=settings.dtype, seed=settings.seed, world=world)
    load = load_critic if critic else load_policy
    return load(settings.model_dir, dtype=settings.dtype, world=world)
