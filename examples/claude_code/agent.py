"""Claude Code, unmodified, as an agent: one task in a fresh folder, then a check says whether the task is done.

    reward = await ClaudeCode().run(task, base_url="http://127.0.0.1:8090/v1", api_key="sk-sess-…")

A task is {"prompt", "files": {name: text}, "check": [command and arguments]}, as in tasks.jsonl. Claude Code reads two variables,
ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, and nothing else about it changes. The check stands in the task and not in the
folder, so that the policy, which has a shell there, cannot edit it. $CLAUDE names another program than `claude`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

CONTEXT = "8192"  # tokens: rollout.native.max_context of config.yaml, so that Claude Code compacts before it is full
OUTPUT = "1024"  # most tokens of one answer
SECONDS = 300.0  # for one task; what is not done by then is checked as it stands


class ClaudeCode:
    """1 if the check passes when Claude Code has ended, else 0."""

    def __init__(self) -> None:
        program = os.environ.get("CLAUDE", "claude")
        found = shutil.which(program)
        if found is None:
            raise FileNotFoundError(
                f"{program} is not on PATH: npm install -g @anthropic-ai/claude-code, or set CLAUDE to where it is"
            )
        self.program = os.path.abspath(found)

    async def run(self, task: dict[str, Any], *, base_url: str, api_key: str) -> float:
        with tempfile.TemporaryDirectory(prefix="claude-task-") as place:
            home, work = Path(place, "home"), Path(place, "work")
            home.mkdir()
            work.mkdir()
            for name, text in task["files"].items():
                (work / name).write_text(text, encoding="utf-8")
            environment = {
                "PATH": os.environ["PATH"],
                "HOME": str(home),
                "TERM": "xterm",
                "LANG": "C.UTF-8",
                "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),  # it appends /v1/messages itself
                "ANTHROPIC_API_KEY": api_key,
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "CLAUDE_CODE_MAX_CONTEXT_TOKENS": CONTEXT,
                "CLAUDE_CODE_MAX_OUTPUT_TOKENS": OUTPUT,
            }
            command = [self.program, "-p", task["prompt"], "--bare", "--model", "policy", "--output-format", "json"]
            await execute([*command, "--allowedTools", "Bash,Edit,Read"], work, environment)
            checked = await execute(task["check"], work, {"PATH": os.environ["PATH"], "HOME": str(home)})
            return float(checked == 0)


async def execute(command: list[str], folder: Path, environment: dict[str, str]) -> int | None:
    """Exit code; None if it took longer than SECONDS. Whatever it started has ended by then, too."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return await asyncio.wait_for(process.wait(), SECONDS)
    except TimeoutError:
        return None
    finally:
        with suppress(ProcessLookupError):  # nothing of it is left
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
