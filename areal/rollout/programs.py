"""Agents that are programs: a command line, run once per try of a task in processes of its own (docs/agents.md).

    agent = ProgramAgent(settings, words)                       # an Agent: await agent.run(task, base_url=…, api_key=…)
    agent = ProgramAgent(settings, words, driver)               # as a framework wants to be started (frameworks/)

The program finds base URL and key where the SDKs look for them, the task as JSON in AREAL_TASK and in the file AREAL_TASK_FILE, and a
fresh folder that holds the task's `files`. Its reward is what the task's `check` says (which the policy cannot speak through), else the
number in the last line that it prints, {"reward": x}, else what it has set itself. A program that is late or, as no framework's, ends
with another code than 0 has failed. Used by agent_choice.py.
"""

from __future__ import annotations

import errno
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from areal.base.errors import BadRequest, CallFailed, ConfigError
from areal.cluster.program import Ended, clean_environment, run_program
from areal.config.commands import fill
from areal.config.run import RunConfig
from areal.rollout.agent_output import Spoken, speaking
from areal.rollout.agents import Reward

TEXT_FIELDS = ("prompt", "question")
LONGEST_VARIABLE = (
    100_000  # bytes of AREAL_TASK; Linux takes 128 KiB for one variable or word, and refuses the program above
)


@dataclass(frozen=True, slots=True)
class ProgramSettings:
    """context_tokens: of the model; output_tokens: of one answer. environment: names that are passed on."""

    model: str
    max_turns: int
    context_tokens: int
    output_tokens: int
    timeout_s: float
    memory_mb: int | None
    environment: tuple[str, ...]

    @classmethod
    def of(cls, config: RunConfig) -> ProgramSettings:
        agent, context = config.rollout.agent, config.rollout.native.max_context
        return cls(
            model=agent.model_name,
            max_turns=agent.max_turns,
            context_tokens=context,
            output_tokens=config.gconfig.max_new_tokens or max(64, context // 8),
            timeout_s=agent.process.timeout_seconds,
            memory_mb=agent.process.memory_mb,
            environment=tuple(agent.process.environment),
        )


@dataclass(frozen=True, slots=True)
class Try:
    """One try of a task. base_url: with /v1. folder, home: fresh, for this try alone."""

    task: Mapping[str, Any]
    base_url: str
    api_key: str
    folder: Path
    home: Path
    settings: ProgramSettings

    @property
    def prompt(self) -> str:
        return prompt_of(self.task)

    @property
    def task_json(self) -> str:
        return json.dumps(self.task, ensure_ascii=False)

    @property
    def task_file(self) -> Path:
        """Beside the folder, which is the task's own."""
        return self.folder.parent / "task.json"

    @property
    def root_url(self) -> str:
        """Without /v1, as Anthropic's SDK wants it."""
        return self.base_url.removesuffix("/v1")


class Driver(Protocol):
    """How a framework that is a program is started. command: its own, where rollout.agent.command names none. counts_turns: whether it can
    be told max_turns; of one that cannot, the proxy refuses later calls."""

    @property
    def counts_turns(self) -> bool: ...

    @property
    def command(self) -> Sequence[str]: ...

    def prepare(self, one: Try) -> dict[str, str]:
        """Write what it reads into one.home; variables for its environment, beside those of every program."""
        ...


class ProgramAgent:
    """Runs one program per try. Without a driver it works in the run's own working directory, with one in the task's folder."""

    def __init__(self, settings: ProgramSettings, words: Sequence[str], driver: Driver | None = None) -> None:
        self._settings = settings
        self._words = words
        self._driver = driver
        self.max_calls = None if driver is None or driver.counts_turns else settings.max_turns

    async def run(self, task: dict[str, Any], *, base_url: str, api_key: str) -> Reward:
        """Raises CallFailed where it was late or failed, BadRequest for a task or a reward that is none."""
        with tempfile.TemporaryDirectory(prefix="areal-task-", ignore_cleanup_errors=True) as place:
            one = Try(task, base_url, api_key, Path(place, "work"), Path(place, "home"), self._settings)
            for folder in (one.folder, one.home):
                folder.mkdir()
            _write_files(one)
            return await self._run(one)

    async def _run(self, one: Try) -> Reward:
        spoken, complaint = Spoken(speaking.get()), Spoken(speaking.get())
        words, environment, folder = fill(self._words, _values(one), _fields(one.task)), _environment(one), None
        if self._driver is not None:
            own = {"HOME": str(one.home), "TMPDIR": str(one.home)}  # what a killed one leaves behind goes with it
            environment |= own | self._driver.prepare(one)
            folder = one.folder
        limits: dict[str, Any] = {"timeout_s": one.settings.timeout_s, "memory_mb": one.settings.memory_mb}
        ended = await _ended(words, environment, out=spoken.line, err=complaint.line, folder=folder, **limits)
        complained, printed = complaint.last, spoken.last  # of the program, not of its check
        if ended.exit_code:
            complaint.line(f"({words[0]} {ended.how} after {ended.seconds:.0f} s)")
        if ended.timed_out:
            raise CallFailed(
                "timed_out",
                f"{words[0]} took longer than rollout.agent.process.timeout_seconds={one.settings.timeout_s:g}",
            )
        if "check" in one.task:
            checked = await _ended(
                [str(word) for word in one.task["check"]], environment, out=spoken.line, folder=one.folder, **limits
            )
            return float(checked.exit_code == 0 and not checked.timed_out)
        if (reward := printed_reward(printed)) is not None:
            return reward
        if ended.exit_code and self._driver is None:
            last = complained or printed
            raise CallFailed("died", f"{words[0]} {ended.how}{f'; it said last: {last[:500]}' if last else ''}")
        return None


async def _ended(words: Sequence[str], environment: Mapping[str, str], **how: Any) -> Ended:
    """run_program, where a text is too long for a command line as a sentence with the ways around it."""
    try:
        return await run_program(words, environment, **how)
    except ConfigError as error:
        if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.E2BIG:
            raise
        longest = max(len(word.encode()) for word in (*words, *environment.values()))
        raise BadRequest(
            f"cannot start {words[0]}: a text of {longest} bytes is too long for a command line or a variable (128 KiB on Linux); let the agent "
            "read the task from $AREAL_TASK_FILE or {task_file} in place of {task} and {prompt}, or put long texts into the task's `files`"
        ) from error


def prompt_of(task: Mapping[str, Any]) -> str:
    """The text of a task: its `prompt`, else its `question`, else its JSON."""
    return next((str(task[name]) for name in TEXT_FIELDS if name in task), json.dumps(task, ensure_ascii=False))


def printed_reward(line: str) -> Reward:
    """Of a line {"reward": number} or {"rewards": {answer's id: number}}; None for any other. Raises BadRequest for a reward that is none."""
    try:
        said = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.MsgspecError:
        return None
    found = said.get("reward", said.get("rewards"))
    if found is not None and not isinstance(found, int | float | dict):
        raise BadRequest(f'the agent printed {line:.200} as its reward; print a number, as in {{"reward": 1.0}}')
    return found


def _write_files(one: Try) -> None:
    one.task_file.write_text(one.task_json, encoding="utf-8")
    files = one.task.get("files") or {}
    if not isinstance(files, dict):
        raise BadRequest(f"`files` of a task is an object {{name: text}}, not {files!r:.80}")
    for name, text in files.items():
        path = (one.folder / name).resolve()
        if not path.is_relative_to(one.folder.resolve()):
            raise BadRequest(f"the task's file {name!r} lies outside of its folder; name it relative to that")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text), encoding="utf-8")


def _values(one: Try) -> dict[str, str]:
    return {
        "task": one.task_json,
        "task_file": str(one.task_file),
        "prompt": one.prompt,
        "task_id": str(one.task.get("task_id", "")),
        "base_url": one.base_url,
        "api_key": one.api_key,
        "model": one.settings.model,
        "max_turns": str(one.settings.max_turns),
        "folder": str(one.folder),
        "home": str(one.home),
    }


def _fields(task: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for name, value in task.items()
    }


def _environment(one: Try) -> dict[str, str]:
    """docs/agents.md has this list."""
    short = len(one.task_json.encode()) <= LONGEST_VARIABLE
    return clean_environment(
        one.settings.environment,
        OPENAI_BASE_URL=one.base_url,
        OPENAI_API_BASE=one.base_url,  # what langchain, litellm and aider read
        OPENAI_API_KEY=one.api_key,
        OPENAI_MODEL=one.settings.model,
        ANTHROPIC_BASE_URL=one.root_url,
        ANTHROPIC_API_KEY=one.api_key,
        ANTHROPIC_MODEL=one.settings.model,
        AREAL_BASE_URL=one.root_url,
        AREAL_API_KEY=one.api_key,
        AREAL_MODEL=one.settings.model,
        AREAL_MAX_TURNS=str(one.settings.max_turns),
        AREAL_TASK_FILE=str(one.task_file),
        AREAL_TASK_ID=str(one.task.get("task_id", "")),
        AREAL_TASK_FOLDER=str(one.folder),
        **({"AREAL_TASK": one.task_json} if short else {}),
    )
