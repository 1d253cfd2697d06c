"""The command line of an agent that the service starts: words with placeholders, filled in for each session. No shell.

    words = split_command("python agent.py --task {prompt}")        # a text as a shell would split it, or a list of words
    fill(words, {"prompt": "Hi", "base_url": "http://…/v1", …})      # ["python", "agent.py", "--task", "Hi"]

A placeholder may stand anywhere in a word and is never split or quoted again. `{task.NAME}` is a field of the task, `{{name}}` the
braces themselves. Used by own_agents.py before anything starts, and by rollout/programs.py.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from areal.base.errors import ConfigError

PLACEHOLDERS: Mapping[str, str] = {
    "task": "the whole task as JSON; a task that is a text: that text",
    "prompt": "the task's text: its `prompt`, else `question`, else its JSON",
    "task_file": "the path of a file with that JSON, for tasks that are too long for a command line",
    "task_id": "the task's name",
    "base_url": "of the gateway's OpenAI routes, with /v1",
    "api_key": "of the session; better read from the environment, since command lines can be seen by others",
    "model": "rollout.agent.model_name",
    "max_turns": "rollout.agent.max_turns",
    "folder": "a fresh folder with the task's `files`, gone afterwards",
    "home": "another fresh folder, gone afterwards",
}
_BRACES = re.compile(r"\{\{([a-z_]+(?:\.[\w-]+)?)\}\}|\{([a-z_]+)(?:\.([\w-]+))?\}")
_OF_A_SHELL = frozenset({"|", "||", "&&", ";", "&", ">", ">>", "<", "2>", "2>&1"})


def split_command(command: str | Sequence[str]) -> list[str]:
    """Words. Raises ConfigError: empty, an unclosed quote, a shell's operator, an unknown placeholder."""
    try:
        words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
    except ValueError as error:
        raise ConfigError(
            f"rollout.agent.command: {command!r} cannot be split into words ({error}); write it as a list"
        ) from None
    if not words:
        raise ConfigError("rollout.agent.command is empty; write the agent's command line, or take it out")
    if isinstance(command, str) and (found := next((word for word in words if word in _OF_A_SHELL), None)):
        raise ConfigError(
            f"rollout.agent.command: {found} is a shell's, and none runs here; write the command as [sh, -c, '…'] and read the task "
            "from $AREAL_TASK there"
        )
    for word in words:
        for match in _BRACES.finditer(word):
            if match[2] and (match[2] not in PLACEHOLDERS or (match[3] and match[2] != "task")):
                raise ConfigError(
                    f"rollout.agent.command: {match[0]} is no placeholder; known are "
                    f"{', '.join('{' + name + '}' for name in PLACEHOLDERS)} and {{task.FIELD}}; {{{match[0]}}} means the braces themselves"
                )
    return words


def fill(words: Sequence[str], values: Mapping[str, str], fields: Mapping[str, str]) -> list[str]:
    """The words of one session. values: by PLACEHOLDERS. fields: of the task. Raises ConfigError for a field that this task lacks."""

    def value(match: re.Match[str]) -> str:
        if match[1]:
            return f"{{{match[1]}}}"
        if not match[3]:
            return values[match[2]]
        if match[3] not in fields:
            raise ConfigError(f"rollout.agent.command: task {values['task_id']} has no field {match[3]!r}")
        return fields[match[3]]

    return [_BRACES.sub(value, word) for word in words]
