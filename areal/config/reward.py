"""How the run rewards sessions by itself (`rollout.reward`), where `rollout.agent.reward_source` is not the client.

Which key which source honours is checked in rewarded.py. docs/rewards.md is the page for users.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from areal.config.section import Section

Parser = Literal["number", "verdict", "json"]


class RewardConfig(Section):
    path: str | None = None
    """function only: the Python function that rewards, as `module:attribute`, plain or async, called as `f(task, messages, answers)` in
    a process of its own. It returns a number for the last answer, or {answer id: number}, or None where there is no reward."""
    rubric: str | None = None
    """Models only: what makes an answer good, in your words; it stands in the built-in prompts as {rubric}. null = correct, complete and
    to the point."""
    prompt: str | None = None
    """Models only: the whole prompt in place of the built-in one; placeholders in docs/rewards.md ({task}, {conversation}, {answer} …)."""
    prompt_path: str | None = None
    """Models only: a text file that holds it."""
    parser: Parser | None = None
    """Models only: how the answer becomes a number (docs/rewards.md has the exact rules). null = number for reward_model, verdict for
    judge_model, json where `relative` is on."""
    field: str | None = None
    """json only: which field of the answer's last JSON object is the number, or the list of numbers under `relative`. null = score, or scores
    there, as the built-in prompts ask."""
    good: list[str] = Field(["correct", "yes", "pass", "true", "good"])
    """verdict only: the words that count as the upper bound, in any case."""
    bad: list[str] = Field(["incorrect", "wrong", "no", "fail", "false", "bad"])
    """verdict only: the words that count as the lower bound."""
    bounds: list[float] | None = None
    """[lowest, highest] number that the source is to give; another one cannot be read (see `clip`). null = [0, 1] for models, any
    for a function."""
    clip: bool = False
    """A number outside of `bounds` counts as the nearer bound."""
    scale: float = 1.0
    """The reward is offset + scale × the source's number; 2 and an offset of -1 make [0, 1] to [-1, 1]."""
    offset: float = 0.0
    """See `scale`."""
    relative: bool = False
    """Models only: all answers of a group stand in one prompt and are scored against each other; needs gconfig.n_samples of 2 or more.
    A held-out task has one answer, which is asked about by itself."""
    concurrency: int = Field(8, ge=1)
    """Calls of the source at once; for a function, its processes. The channel's own limit per route stands beside it."""
    timeout_seconds: float | None = Field(None, gt=0)
    """Longest wait for one call, with all attempts that the channel makes of it. null = 60 for a function, else what api_gateway lets
    one call take (max_retries, timeout, deadline_seconds, queue_timeout_seconds)."""
    attempts: int = Field(3, ge=1)
    """How often one session is scored before it is dropped as reward_failed: answers that cannot be read, a function that raises or is
    late. Calls that fail because the source is away are not counted, and HTTP failures are tried again by the channel alone."""
    cache_size: int = Field(10_000, ge=0)
    """Models only: prompts whose score is remembered, so that the same answer to the same task is scored once; in memory, 0 = none."""
    down_after_seconds: float = Field(30.0, gt=0)
    """A source that answers nobody for so long is away: no session starts until it answers again, those that wait go on waiting. It is
    asked again at pauses of up to half of this."""
    evaluation_seconds: float = Field(600.0, gt=0)
    """Longest wait of an evaluation for its rewards, once its agents are done; what has none by then is left out of the mean, and said."""
    memory_mb: int | None = Field(None, ge=64)
    """function only: most memory of one of its processes; null = no limit."""
    environment: list[str] = Field([])
    """function only: names of environment variables that its processes see, beside what every program needs (PATH, HOME, …)."""
