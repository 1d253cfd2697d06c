"""What a configuration names as `module:attribute`: the user's own Python, imported from the working directory.

    agent = load_target("examples.math_agent.agent:MathAgent", "rollout.agent.path")     # a class is instantiated

Used by agents.py in a worker, and by pool_child.py in a process of its own.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from areal.base.errors import ConfigError
from areal.base.own_code import own_code


def load_target(path: str, key: str) -> Any:
    """The object at `path`; a class is instantiated without arguments. key: the configuration's name for it. Raises ConfigError saying
    which half is wrong, or what the user's module or class raised."""
    module_name, _, attribute = path.partition(":")
    if not attribute:
        raise ConfigError(f"{key} is {path!r}; write it as module:attribute")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)  # paths of a config are relative to the working directory, module paths too
    with own_code(f"{key}={path}"):
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise ConfigError(f"{key}: cannot import {module_name} ({error}); is it on PYTHONPATH?") from error
        try:
            found = getattr(module, attribute)
        except AttributeError as error:
            raise ConfigError(f"{key}: module {module_name} has no {attribute}") from error
        return found() if isinstance(found, type) else found
