"""What areal doctor prints: plain lines in a fixed order, or one JSON object with the same facts.

    print(as_text(report)); print(as_json(report))

Names of lines and of JSON keys stay from release to release; numbers are whole, texts of sessions are quoted as data. Pure. Used by
areal/doctor.py.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from areal.base.redact import redact
from areal.base.types import ExportStyle
from areal.cluster.program import Ended
from areal.proxy.statistics import Branch, TokenSums, merge_rate
from areal.tools.doctor.diagnosis import DIALECT_NAMES, Diagnosis, SessionFound
from areal.tools.doctor.findings import Finding

_LABEL = 12
_WIDTH = 120
_MOST_FORKS = 20  # shown as text; JSON has all
_STYLES: tuple[ExportStyle, ...] = ("individual", "concat")


@dataclass(frozen=True, slots=True)
class Report:
    """command: of the agent. answered_by: model or script, in words. rollouts: sessions that one training step takes (groups x samples)."""

    found: Diagnosis
    command: str
    run: Ended
    findings: tuple[Finding, ...]
    answered_by: str
    style: ExportStyle
    rollouts: int

    @property
    def trainable(self) -> bool:
        return not any(one.severity == "loss" for one in self.findings)


def as_text(report: Report) -> str:
    """For people; ends with a line end."""
    found, tokens, tools = report.found, report.found.tokens, report.found.tools
    lines = [
        f"areal doctor: {report.command}",
        "",
        *_line("answered by", report.answered_by),
        *_line("agent", f"{report.run.how} after {report.run.seconds:.1f} s"),
        *_line("sessions", _sessions(found)),
        *_line("calls", _calls(found)),
        *_line("merge rate", _merge_rate(found)),
        *_line("forks", _forks(found)),
    ]
    for session, branch in found.branches[:_MOST_FORKS]:
        lines += _fork(session, branch)
    lines += [
        *_line("rewards", f"{found.rewards_set} set, sum {found.reward_sum:g}" if found.rewards_set else "none seen"),
        *_line("tool calls", f"{tools.parsed} read, {tools.malformed} of them malformed, {tools.unread} unread" if tools.offered else "no tools offered"),
        *_line("tokens", _tokens(tokens)),
        *_line("training", _training(report)),
        "",
    ]  # fmt: skip
    for finding in report.findings:
        lines += [f"{finding.severity}: {finding.text}", *_wrapped(f"-> {finding.advice}")]
    lines.append("trainable as it is" if report.trainable else "not trainable as it is: see what is marked as loss")
    return _harmless(redact("\n".join(lines))) + "\n"


def as_json(report: Report) -> str:
    """For programs: one object, on several lines."""
    found = report.found
    body = {
        "trainable": report.trainable,
        "answered_by": report.answered_by,
        "agent": {
            "command": report.command,
            "exit_code": report.run.exit_code,
            "seconds": round(report.run.seconds, 3),
            "timed_out": report.run.timed_out,
        },
        "calls": found.calls,
        "dialects": list(found.dialects),
        "mergeable": found.mergeable,
        "merged": found.merged,
        "merge_rate": merge_rate(found.merged, found.mergeable),
        "forks": [_fork_facts(session, branch) for session, branch in found.branches],
        "rewards_set": found.rewards_set,
        "reward_sum": found.reward_sum,
        "tool_calls": {
            "offered": found.tools.offered,
            "parsed": found.tools.parsed,
            "malformed": found.tools.malformed,
            "unread": found.tools.unread,
        },
        "tokens": _token_facts(found.tokens),
        "rows": {style: {"rows": found.rows(style).rows, "tokens": found.rows(style).tokens} for style in _STYLES},
        "sessions": [_session_facts(one) for one in found.sessions],
        "findings": [
            {"name": one.name, "severity": one.severity, "text": one.text, "advice": one.advice}
            for one in report.findings
        ],
    }
    return redact(json.dumps(body, indent=2, ensure_ascii=False)) + "\n"


def _line(label: str, text: str) -> Iterable[str]:
    first, *more = textwrap.wrap(text, _WIDTH - _LABEL) or [""]
    return [f"{label:<{_LABEL}}{first}", *(" " * _LABEL + each for each in more)]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent="  ", subsequent_indent="     ", break_long_words=False, break_on_hyphens=False
    )


def _sessions(found: Diagnosis) -> str:
    ways = {"start_session": "by start_session", "hint": "by the client's own name", "conversation": "by conversation"}
    said = ", ".join(f"{_shown(one.session.id)} ({ways[one.opened_by]}, {one.fate})" for one in found.sessions[:5])
    more = f", and {len(found.sessions) - 5} more" if len(found.sessions) > 5 else ""
    return f"{len(found.sessions)}{f': {said}{more}' if said else ''}"


def _calls(found: Diagnosis) -> str:
    spoken = ", ".join(DIALECT_NAMES.get(name, name) for name in found.dialects)
    per_session = ", ".join(str(one.statistics.calls) for one in found.sessions[:10])
    several = f"; turns per session {per_session}" if len(found.sessions) > 1 else ""
    return f"{found.calls}{f' in {spoken}' if spoken else ''}{several}"


def _merge_rate(found: Diagnosis) -> str:
    rate = merge_rate(found.merged, found.mergeable)
    if rate is None:
        return "nothing to merge: no turn follows another"
    return f"{rate:.2f}: {found.merged} of {found.mergeable} turns went on from their own sampled tokens"


def _forks(found: Diagnosis) -> str:
    left = len(found.branches) - _MOST_FORKS
    return (
        f"{len(found.branches) or 'none'}{f'; the first {_MOST_FORKS} are shown, --json has all' if left > 0 else ''}"
    )


def _fork(session: SessionFound, branch: Branch) -> list[str]:
    fork = branch.fork
    lines = [f"  turn {branch.index} of {_shown(session.session.id)}: {fork.reason}, {fork.detail}"]
    if fork.before or fork.recorded or fork.requested:
        lines += [
            f"    token {fork.position}, after {_quoted(fork.before)}",
            f"    recorded {_quoted(fork.recorded)}",
            f"    request  {_quoted(fork.requested)}",
        ]
    return lines


def _tokens(tokens: TokenSums) -> str:
    return f"recorded {tokens.recorded} = trained {tokens.trained} + {_part('masked', tokens.masked)} + {_part('dropped', tokens.dropped)}"


def _part(name: str, counts: Mapping[str, int]) -> str:
    why = ", ".join(f"{reason} {count}" for reason, count in counts.items())
    return f"{name} {sum(counts.values())}{f' ({why})' if why else ''}"


def _training(report: Report) -> str:
    played = len(report.found.played)
    if not played:
        return "nothing"
    made = report.found.rows(report.style)
    rows, tokens, trained = (n / played for n in (made.rows, made.tokens, report.found.tokens.trained))
    step = f"; a step of {report.rollouts} rollouts: about {rows * report.rollouts:.0f} rows, {tokens * report.rollouts:.0f} tokens"
    return f"per rollout, as {report.style}: {rows:g} row{'' if rows == 1 else 's'} of {tokens:.0f} tokens, {trained:.0f} of them trained{step}"


def _fork_facts(session: SessionFound, branch: Branch) -> dict[str, Any]:
    fork = branch.fork
    return {
        "session_id": session.session.id,
        "interaction_id": branch.interaction_id,
        "index": branch.index,
        "lost": branch.lost,
        "reason": fork.reason,
        "detail": fork.detail,
        "against": fork.against,
        "position": fork.position,
        "before": fork.before,
        "recorded": fork.recorded,
        "requested": fork.requested,
    }


def _session_facts(one: SessionFound) -> dict[str, Any]:
    return {
        "session_id": one.session.id,
        "opened_by": one.opened_by,
        "fate": one.fate,
        "user_agent": one.agent,
        "calls": one.statistics.calls,
        "dialects": list(one.dialects),
        "rows": one.statistics.rows,
        "merge_rate": one.statistics.merge_rate,
        "branches": one.statistics.reasons,
        "rewards_set": one.statistics.rewards_set,
        "reward_sum": one.statistics.reward_sum,
        "tokens": _token_facts(one.statistics.tokens),
    }


def _token_facts(tokens: TokenSums) -> dict[str, Any]:
    return {
        "recorded": tokens.recorded,
        "trained": tokens.trained,
        "masked": dict(tokens.masked),
        "dropped": dict(tokens.dropped),
    }


def _harmless(text: str) -> str:
    """What models and clients wrote must not steer a terminal."""
    return "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in text)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _shown(name: str) -> str:
    return name if len(name) <= 48 and name.isprintable() else _quoted(name[:48]) + "…"
