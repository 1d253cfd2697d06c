"""What is wrong with a run of an agent, how bad it is, and what to change.

    findings = judge(found, run, requests, Setting(...))
    any(one.severity == "loss" for one in findings)        # then the agent is not trainable as it is

Three severities. loss: tokens are not trained, or nothing can be learnt from them. cost: everything is trained, but in more rows, with
more retries or cut answers. note: worth knowing. Each finding ends with what to do; advice.py has the sentences that depend on a
reason. Pure. Used by areal/doctor.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from areal.base.types import ExportStyle
from areal.cluster.program import Ended
from areal.config.rollout import RewardKey, RewardSource
from areal.tools.doctor.advice import DROPPED, FORKED, MASKED, client_advice
from areal.tools.doctor.diagnosis import Diagnosis

Severity = Literal["loss", "cost", "note"]
# Masked on purpose, or replaced by another answer: nothing of the task is lost.
_NO_LOSS = frozenset({"side_request", "superseded"})
_MODEL_ROUTES = ("chat", "responses", "messages")


@dataclass(frozen=True, slots=True)
class Finding:
    """name: stable, for programs. text: what was found. advice: what to change."""

    name: str
    severity: Severity
    text: str
    advice: str


@dataclass(frozen=True, slots=True)
class Requests:
    """What the gateway counted: answers by (route, status)."""

    answers: Mapping[tuple[str, int], int]

    def failed(self, *routes: str) -> Counter[int]:
        """Answers of 400 and above by status; no routes named: on every route."""
        found: Counter[int] = Counter()
        for (route, status), count in self.answers.items():
            if status >= 400 and (not routes or route in routes):
                found[status] += count
        return found


@dataclass(frozen=True, slots=True)
class Setting:
    """What of the configuration and the command line matters here. explicit: the agent was given the key of one session."""

    url: str
    model: str  # empty: no model named, so the template is the scripted backend's
    scripted: bool
    style: ExportStyle
    max_turns: int
    n_samples: int
    reward_key: RewardKey
    reward_source: RewardSource
    explicit: bool
    timeout_s: float


def judge(found: Diagnosis, run: Ended, requests: Requests, setting: Setting) -> tuple[Finding, ...]:
    """All findings, the worst first."""
    every = [
        *_agent(run, setting, answered=bool(found.calls)),
        *_calls(found, requests, setting),
        *_rewards(found, setting),
        *_tokens(found),
        *_sessions(found, setting),
        *_forks(found),
        *_answers(found, setting),
        *_rows(found, setting),
    ]
    order: tuple[Severity, ...] = ("loss", "cost", "note")
    return tuple(sorted(every, key=lambda one: order.index(one.severity)))


def _agent(run: Ended, setting: Setting, *, answered: bool) -> Iterator[Finding]:
    if run.timed_out:
        yield Finding(
            "agent_timeout", "loss", f"the agent did not end within {setting.timeout_s:g} s and was stopped",
            "see in its output what it waits for (a terminal? standard input is empty here); raise --timeout if it only needs longer",
        )  # fmt: skip
    elif run.exit_code:
        played = "; a script plays as it stands: an agent that needs JSON or a tool call in the answer wants one that holds it " \
            "(--script FILE, docs/scripted.md), or a model (actor.path=…)"  # fmt: skip
        yield Finding(
            "agent_failed", "loss", f"the agent {run.how}",
            "its output says why; a run in training that fails like this is dropped (reward_failed) or has no reward"
            f"{played if answered and setting.scripted else ''}",
        )  # fmt: skip
    if run.left_running:
        yield Finding(
            "agent_left_processes", "note", f"{_many(run.left_running, 'process', 'es')} of the agent outlived it and had to be ended",
            "let the command wait for what it starts, so that its calls belong to its session",
        )  # fmt: skip


def _calls(found: Diagnosis, requests: Requests, setting: Setting) -> Iterator[Finding]:
    failed = requests.failed(*_MODEL_ROUTES) if found.calls else requests.failed()
    if not found.calls and not sum(requests.answers.values()):
        yield Finding(
            "no_request", "loss", "not one request came from the agent",
            f"it takes its base URL from elsewhere: let it read OPENAI_BASE_URL ({setting.url}/v1) or ANTHROPIC_BASE_URL ({setting.url}), "
            "which are set in its environment, or write the URL into its configuration (--port makes it the same each time)",
        )  # fmt: skip
    elif not found.calls:
        said = f"no model call was answered; {_statuses(failed)}" if failed else "requests came, and no model call"
        yield Finding("no_call", "loss", said, _status_advice(failed, setting))
    elif failed:
        yield Finding(
            "calls_failed",
            "cost",
            f"some model calls were refused: {_statuses(failed)}",
            _status_advice(failed, setting),
        )


def _status_advice(failed: Mapping[int, int], setting: Setting) -> str:
    advice = {
        401: "send the key of the environment (OPENAI_API_KEY, ANTHROPIC_API_KEY) as Authorization: Bearer or x-api-key",
        404: f"check the path behind the base URL: {setting.url}/v1/chat/completions, /v1/responses, /v1/messages",
        400: "the agent's output has the sentence that says which field is at fault",
        429: "no slot was free for a session that the agent opened; it starts more sessions than it ends",
        499: "the client hung up before its answer was complete: raise its time-out",
    }
    said = [advice[status] for status in failed if status in advice]
    return "; ".join(said) or "the agent's output and gateway.log (--output-dir keeps it) say why"


def _rewards(found: Diagnosis, setting: Setting) -> Iterator[Finding]:
    if not found.played:
        return
    if setting.reward_source != "client":
        yield Finding(
            "rewarded_by_the_run", "note", f"a run rewards these sessions by itself once they have ended (rollout.agent.reward_source={setting.reward_source}); "
            "here nobody was asked",
            "nothing is to be done by the agent; docs/rewards.md says how it is rewarded",
        )  # fmt: skip
        return
    if setting.reward_key == "admin":
        if not found.rewards_set:
            yield Finding(
                "no_reward", "note", "no reward was set while the agent ran; in this configuration the agent may not (rollout.agent.reward_key=admin)",
                "let the verifier call POST /rl/set_reward with the admin key and the session_id before the session ends",
            )  # fmt: skip
        return
    without = [one for one in found.played if not one.statistics.rewards_set]
    if not found.rewards_set:
        named = ""
        if any(one.opened_by == "conversation" for one in without):
            named = ', and the id of an answer as "interaction_id"'  # no call of theirs carried a name
        elif not setting.explicit:
            named = " with the header x-session-id, which holds the name that its model calls carry"
        yield Finding(
            "no_reward", "loss", "no reward was set: there is nothing to learn from (a session that idles out without one is dropped, one that is ended counts 0)",
            f'after the task, let the agent, or the command line that runs it, call POST {setting.url}/rl/set_reward with {{"reward": 1.0}} and the '
            f"same key{named}, then /rl/end_session; or return the reward from an inline agent (rollout.agent.path), or let a verifier set it "
            "(rollout.agent.reward_key=admin)",
        )  # fmt: skip
    elif without:
        names = ", ".join(one.session.id[:60] for one in without[:3])
        yield Finding(
            "reward_missing", "note", f"{len(without)} of {_many(len(found.played), 'session')} had no reward of its own ({names})",
            "set one in each: name the session by its key, by x-session-id, or by the interaction_id of an answer in it",
        )  # fmt: skip


def _tokens(found: Diagnosis) -> Iterator[Finding]:
    tokens = found.tokens
    for kind, counts, table in (("dropped", tokens.dropped, DROPPED), ("masked", tokens.masked, MASKED)):
        for reason, count in counts.items():
            share = 100 * count / tokens.recorded
            yield Finding(
                f"{kind}:{reason}", "note" if reason in _NO_LOSS else "loss",
                f"{count} of {tokens.recorded} sampled tokens ({share:.0f} %) would be {kind}: {reason}",
                table.get(reason, "see docs/http.md, \"What is recorded\""),
            )  # fmt: skip
    if found.played and not tokens.recorded:
        yield Finding(
            "no_token", "loss", "every answer was empty: not one token was sampled",
            "look at the agent's max_tokens and stop texts, and at the script if answers are scripted",
        )  # fmt: skip


def _sessions(found: Diagnosis, setting: Setting) -> Iterator[Finding]:
    empty = len(found.sessions) - len(found.played)
    if empty and found.played:
        yield Finding(
            "empty_session", "note", f"{_many(empty, 'session')} began and recorded nothing",
            "start a session only when its first call follows, and use its key for the calls",
        )  # fmt: skip
    split = [one for one in found.played if one.opened_by == "conversation"]
    if len(split) > 1:
        yield Finding(
            "sessions_split", "cost", f"{len(split)} sessions were told apart by their conversations alone, because no call named its session",
            "if they are one task, send the header X-Session-Id with every call (Claude Code: ANTHROPIC_CUSTOM_HEADERS=\"X-Session-Id: …\"), "
            "else each is rewarded, and idles out, on its own",
        )  # fmt: skip
    alone = [one for one in found.played if one.opened_by != "start_session"]
    if alone and setting.n_samples > 1:
        yield Finding(
            "tries_apart",
            "note",
            f"gconfig.n_samples={setting.n_samples} compares tries of one task, and a session that opens by itself is a task of its own",
            "in training, start each try with POST /rl/start_session and the same task_id (--session TASK tries it here)",
        )
    full = [
        one for one in found.played if one.opened_by != "start_session" and one.statistics.calls >= setting.max_turns
    ]
    if full:
        yield Finding(
            "session_full", "cost", f"{_many(len(full), 'session')} ended with call number {setting.max_turns}, whatever the agent was doing",
            f"raise rollout.agent.max_turns above {setting.max_turns}, or start sessions with POST /rl/start_session",
        )  # fmt: skip


def _forks(found: Diagnosis) -> Iterator[Finding]:
    counts = Counter(branch.fork.reason for _, branch in found.branches)
    lost = {branch.fork.reason for _, branch in found.branches if branch.lost}
    for reason, count in counts.items():
        text = f"{_many(count, 'branch', 'es')} because of {reason}"
        if reason not in lost:
            if advice := FORKED.get(reason, ""):
                yield Finding(f"fork:{reason}", "note", text, advice)
            continue
        said = [client_advice(one.agent, branch.fork) for one, branch in found.branches if branch.fork.reason == reason]
        advice = "; ".join(dict.fromkeys([*filter(None, said), FORKED[reason]]))
        yield Finding(
            f"fork:{reason}",
            "cost",
            f"{text}: turns that could have gone on from a recorded row, and begin one of their own",
            advice,
        )


def _answers(found: Diagnosis, setting: Setting) -> Iterator[Finding]:
    tools = found.tools
    if tools.malformed or tools.unread:
        yield Finding(
            "tool_calls_malformed", "cost",
            f"of {_many(tools.parsed + tools.unread, 'tool call')} {tools.malformed} had arguments that are no JSON object, and {tools.unread} could not be read",
            "an untrained model does this, and a reward can teach it otherwise; if every call is unread, set rollout.agent.tool_call_parser (docs/tools.md)",
        )  # fmt: skip
    elif tools.offered and not tools.parsed and setting.scripted:
        yield Finding(
            "tools_not_called", "note", f"the agent offers tools in {_many(tools.offered, 'call')}, and the script calls none",
            "write a tool call into the script (--script FILE, docs/scripted.md), or let a model answer (actor.path=…), to see the whole loop",
        )  # fmt: skip
    if found.cut:
        yield Finding(
            "answers_cut", "cost", f"{_many(found.cut, 'answer')} ended at a token limit",
            "raise the agent's max_tokens, gconfig.max_new_tokens, or the context (rollout.native.max_context)",
        )  # fmt: skip
    if not setting.model:
        yield Finding(
            "no_model", "note", "no model was named, so prompts were written in a plain ChatML template",
            "name yours (actor.path=FOLDER; its tokenizer and template are enough with --script) to see what its own template does to history",
        )  # fmt: skip


def _rows(found: Diagnosis, setting: Setting) -> Iterator[Finding]:
    now, concat = found.rows(setting.style), found.rows("concat")
    if setting.style == "individual" and 0 < concat.tokens < now.tokens:
        yield Finding(
            "style", "note",
            f"as concat the same tokens are trained in {_many(concat.rows, 'row')} of {concat.tokens} tokens, as individual in {_many(now.rows, 'row')} of {now.tokens}",
            "rollout.agent.export_style=concat makes a training step as much smaller",
        )  # fmt: skip


def _statuses(failed: Mapping[int, int]) -> str:
    return ", ".join(f"{count} × {status}" for status, count in sorted(failed.items()))


def _many(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{'' if count == 1 else plural}"
