"""What the policy says to real agents: plays of the scripted backend, each under a word that stands in the agent's prompt.

    play = Play("loop-bash", ("Let me look.\n" + call("Bash", command="ls -la"), "It is hello.txt."))
    write_script(path, PLAYS)
    play.sampled(vocabulary)             # the token ids that each answer was sampled as

Answers are cut into short pieces, in other places than a tokenizer would, and the whole text of each answer is one token of
the vocabulary too: whoever tokenises an answer again gets other ids than were sampled. Calls are written with odd spacing, which
many agents print in another way when they send them back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.inference.scripted.vocabulary import Vocabulary

END = "<|im_end|>"
CONTEXT = 400_000  # tokens; most of a prompt is one token a byte, and agents send up to 90 KB


@dataclass(frozen=True)
class Play:
    """answers: to the prompts of a session in which `word` is found (a regular expression), in this order. cut: which of them run
    into the limit of tokens."""

    word: str
    answers: Sequence[str]
    delay_ms: float = 1.0  # between two tokens, so that a stream has more than one chunk
    cut: Sequence[int] = ()

    def pieces(self, answer: int) -> list[str]:
        end = [] if answer in self.cut else [END]
        return [*re.findall(r".{1,6}", self.answers[answer], re.DOTALL), *end]

    def sampled(self, vocabulary: Vocabulary) -> list[list[int]]:
        """Token ids of every answer, end of turn included."""
        numbers = range(len(self.answers))
        return [[vocabulary.id_of(piece.encode()) for piece in self.pieces(answer)] for answer in numbers]

    def lines(self) -> list[dict[str, Any]]:
        return [
            {
                "when": self.word,
                "pieces": self.pieces(k),
                "delay_ms": self.delay_ms,
                "logprobs": self._logprobs(k),
                "finish": "length" if k in self.cut else "stop",
            }
            for k in range(len(self.answers))
        ]

    def _logprobs(self, answer: int) -> list[float]:
        """Another one for every token of the play, so that a log-prob on the wrong token shows."""
        return [-(answer + 1) - k / 1024 for k in range(len(self.pieces(answer)))]


def call(tool: str, **arguments: Any) -> str:
    """A tool call as the policy writes it: valid, and spelt unlike any serializer."""
    members = ",  ".join(f"{json.dumps(name)} :  {json.dumps(value)}" for name, value in arguments.items())
    return f'<tool_call>\n{{"name": {json.dumps(tool)}, "arguments": {{ {members} }}}}\n</tool_call>'


def write_script(path: Path, plays: Iterable[Play]) -> None:
    """The script file of all plays together. Plays that stand first are found first."""
    plays = list(plays)
    whole = [answer for play in plays for answer in play.answers if answer]
    lines: list[dict[str, Any]] = [{"settings": {"max_context": CONTEXT}}]
    lines += [line for play in plays for line in play.lines()]
    lines.append({"when": "(?!)", "pieces": whole})  # never played: every answer as one token
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


LOOP = Play(  # a Python agent's: text with a call, parallel calls, the end
    "play-loop",
    (
        "\n\nI will  look \u2713. \n" + call("sh", command="ls -la"),
        call("sh", command="ls -la") + "\n" + call("sh", command=" pwd"),
        "There is  one file: hello.txt \u2713.",
    ),
)
CLAUDE_PLAIN = Play("play-claude-plain", ("\n\nHello there \u2713. \n",))
CLAUDE_BASH = Play(
    "play-claude-bash",
    ("\n\nI will  look. \n" + call("Bash", command="cat hello.txt", description="Read it"), "It says  hello \u2713."),
)
CLAUDE_PARALLEL = Play(
    "play-claude-parallel",
    (
        call("Bash", command="sleep 0.3; echo slow", description="Slow")
        + "\n"
        + call("Bash", description="Fast", command="echo fast"),
        "Both  ran \u2713.",
    ),
)
CLAUDE_AGENT_CHILD = Play(
    "play-claude-child",
    (call("Bash", command="cat hello.txt", description="Read it"), "The child has  read it \u2713."),
)
CLAUDE_TITLED = Play(
    "play-claude-titled", (call("Bash", command="cat hello.txt", description="Read it"), "It says  hello \u2713.")
)
CLAUDE_TITLE = Play(r"\A(?!.*You can call these functions).*play-claude-titled", ('{"title":  "A title"}',))
_ASKS = "I will  ask a sub-agent. " + call(
    "Agent", description="Read it", prompt="play-claude-child: read hello.txt", subagent_type="general-purpose"
)
CLAUDE_AGENT_197 = Play("play-claude-agent-197", (_ASKS, "The sub-agent  is done \u2713."))
CLAUDE_AGENT = Play(  # its sub-agent runs beside it, and reports in a user turn of its own
    "play-claude-agent", (_ASKS, "It  works in the background.", "The sub-agent  is done \u2713.")
)
CLAUDE_BROKEN = Play(  # a call that was cut off
    "play-claude-broken",
    ('<tool_call>\n{"name": "Bash", "arguments": {"command":  "cat /tmp', "I gave up  on it \u2713."),
)
CLAUDE_CUT = Play("play-claude-cut", ("The  first part of it", "and the  second \u2713."), cut=(0,))
CLAUDE_COMPACTED = Play(  # the first result fills the context that it was told of
    "play-claude-long",
    (
        call("Bash", command="cat hello.txt; yes 0123456789 | head -n 1200", description="Read it"),
        call("Bash", command="cat hello.txt", description="Again"),
        "It says  hello \u2713.",
    ),
)
CLAUDE_SUMMARY = Play(  # it goes on from the summary, in which the word of the play stands
    r"CRITICAL: Respond with TEXT ONLY",
    (
        "<analysis>\nIt was  short.\n</analysis>\n"
        "<summary>\nThe task was  play-claude-long: hello.txt was read, it greets \u2713.\n</summary>",
    ),
)
CODEX = Play(
    "play-codex",
    (
        "\n\nI will  look. \n" + call("exec_command", cmd="cat hello.txt"),
        call("exec_command", cmd="echo one") + "\n" + call("exec_command", cmd="echo two"),
        "It says  hello \u2713.",
    ),
)
OPENCODE = Play(
    "play-opencode",
    ("I will  look. " + call("bash", command="cat hello.txt", description="Read it"), "It says  hello \u2713."),
)
OPENCODE_TITLE = Play("You are a title generator", ("A  title",))
OPENCLAW = Play(
    "play-openclaw",
    ("I will  look. " + call("exec", command="cat hello.txt"), "It says  hello \u2713."),
    delay_ms=20.0,  # so that a reader that is late still reads in more than one piece
)
QWEN_CODE = Play(
    "play-qwen",
    (
        "I will  look. " + call("run_shell_command", command="cat hello.txt", description="Read", is_background=False),
        "It says  hello \u2713.",
    ),
)
PLAYS: tuple[Play, ...] = (
    LOOP,
    CLAUDE_PLAIN,
    CLAUDE_BASH,
    CLAUDE_PARALLEL,
    CLAUDE_BROKEN,
    CLAUDE_CUT,
    CLAUDE_SUMMARY,
    CLAUDE_COMPACTED,
    CLAUDE_TITLE,
    CLAUDE_TITLED,
    CLAUDE_AGENT_197,
    CLAUDE_AGENT,
    CLAUDE_AGENT_CHILD,
    CODEX,
    OPENCODE_TITLE,
    OPENCODE,
    OPENCLAW,
    QWEN_CODE,
)
