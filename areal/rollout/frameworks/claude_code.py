"""Claude Code as it is installed: `claude --bare -p PROMPT` in the task's folder, told where its model is by two variables.

It has a home of its own for each try, so that no login, memory or setting of the user's takes part, and it knows how long the context
is, so that it compacts before that is full. What the policy makes it run is run on this machine. Its exit code says what the model did
(cut answers and too many turns are 1), so it is no failure. Used by frameworks/__init__.py.
"""

from __future__ import annotations

from areal.rollout.programs import Try


class ClaudeCode:
    """A Driver."""

    counts_turns = True

    command = (
        *("claude", "--bare", "-p", "{prompt}", "--model", "{model}", "--max-turns", "{max_turns}"),
        *("--output-format", "json", "--allowedTools", "Bash,Edit,Read"),
    )

    def prepare(self, one: Try) -> dict[str, str]:
        """It appends /v1/messages to its base URL itself."""
        return {
            "TERM": "xterm",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(one.settings.context_tokens),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(one.settings.output_tokens),
        }
