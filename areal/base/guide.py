"""The error guide: what a user meets, how the message reads, why it comes, what to do. docs/troubleshooting.md is made of it.

    OAUTH.text()                                   # the message, where the guide itself is what is said
    GATEWAY_UNREACHABLE.text(place="localhost:9000", reason="connection refused")
    situation("port-taken").said_in(log)           # whether a text holds this message, whatever its values: for tests

One place for causes and remedies. `says` is the message as the program says it, with {name} or … where a value stands; a test compares each
with the texts in the source, so that guide and program cannot part (tests/base/test_guide.py). The page: tools/troubleshooting.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Part = Literal[
    "Keys",
    "Gateway and ports",
    "Upstream channel",
    "Agents",
    "Asynchronous training",
    "Configuration",
    "Training",
    "Disk and processes",
]
_VALUE = re.compile(r"\{\w+\}|…")


@dataclass(frozen=True, slots=True)
class Situation:
    """name: for links and tests. seen: where a user meets it, in their words. says: the message."""

    name: str
    part: Part
    seen: str
    says: str
    cause: str
    remedy: str

    def text(self, **values: object) -> str:
        """The message with its values."""
        return self.says.format(**values)

    @property
    def pieces(self) -> tuple[str, ...]:
        """What of the message is always the same."""
        return tuple(piece for piece in _VALUE.split(self.says) if piece.strip(" .:;,()="))

    def said_in(self, text: str) -> bool:
        """Whether the message stands in a text, with any values."""
        words = ".*?".join(re.escape(piece) for piece in _VALUE.split(self.says))
        return re.search(words, text, re.DOTALL) is not None


def situation(name: str) -> Situation:
    """Raises KeyError for a name that is not in the guide."""
    return _BY_NAME[name]


OAUTH = Situation(
    "oauth",
    "Agents",
    "Claude Code: `OAuth token expired or invalid`, or 401 from the gateway",
    "this is an Anthropic credential, which the gateway does not take: set ANTHROPIC_BASE_URL to the gateway and ANTHROPIC_API_KEY to its "
    "token or to a session key, and start Claude Code with --bare (or log out), so that it does not use its OAuth login",
    "Claude Code is logged in and sends its OAuth token, or an API key of Anthropic, instead of the gateway's.",
    "`export ANTHROPIC_BASE_URL=http://localhost:9000/gateway` and `export ANTHROPIC_API_KEY=` with the internal token (`api_key` of the agent "
    "file) or a session key; `unset ANTHROPIC_AUTH_TOKEN`; start with `claude --bare`. The model name is `default`.",
)
GATEWAY_UNREACHABLE = Situation(
    "gateway-unreachable",
    "Gateway and ports",
    "`ConnectionError: local proxy failed, gateway at localhost:9000 not reachable`",
    "local proxy failed, gateway at {place} not reachable ({reason}): start the service, or see gateway.log for why it ended; if another "
    "program has the port (lsof -i:{port}), choose another one (rollout.agent.gateway_port) and tell the agent",
    "Nothing answers there: the service does not run (yet), its gateway ended, or the address is another one.",
    "Look at the line `Proxy gateway available at …` of the run for the address, at the last lines of `gateway.log` for its end. "
    "`scripts/launch_async.sh` waits until the gateway answers; with a script of your own poll `/health` instead of sleeping.",
)
TAKES_TURNS = Situation(
    "async-off",
    "Asynchronous training",
    "Training is not faster than before; `[rollout]` and `[train]` alternate with equal steps",
    "async.enabled is false: generation and training take turns; set it to true for them to overlap",
    "The switch is off, so the run is synchronous whatever the other numbers say.",
    "`async.enabled: true` (or `rollout.max_head_offpolicyness` above 0). `areal compare` shows what it gains.",
)

GUIDE: tuple[Situation, ...] = (
    Situation(
        "invalid-key",
        "Keys",
        "`Error code: 401`, `Invalid API key` from the gateway",
        "Invalid API key: …",
        "No key, a mistyped one, one of another service, or the key of a session that has ended or expired; the text behind the colon says "
        "which.",
        "Start a session (`POST /rl/start_session`, admin key) and use the key it gives; refresh an ended one by passing it as `api_key`. "
        "start_session itself takes `rollout.agent.admin_api_key`.",
    ),
    Situation(
        "session-expired",
        "Keys",
        "401 in the middle of a conversation",
        "the session was idle for too long and expired",
        "No call came for `rollout.agent.session_timeout_seconds`; the session was closed so that its slot is free.",
        "Raise the time-out, or refresh the key (`start_session` with `api_key`).",
    ),
    Situation(
        "forbidden",
        "Keys",
        "403 from a `/rl/…` route",
        "a session key may not call …; use the admin key, rollout.agent.admin_api_key",
        "Session keys open model calls, set_reward and end_session of their own session, nothing else.",
        "Use the admin key for start_session and export; keep it away from agents.",
    ),
    Situation(
        "variable-unset",
        "Keys",
        "The run ends at once with exit code 2",
        "environment variable … is not set; export …=… before starting",
        "The configuration reads `${NAME}`, and this shell does not export NAME.",
        "`export TAOTOKEN_API_KEY=…` in the same shell (`echo $TAOTOKEN_API_KEY` shows whether it is there), or take out what needs it.",
    ),
    Situation(
        "variable-broken",
        "Keys",
        "A key that was copied from a web page",
        "environment variable … has a line break or another control character inside; copy the value again",
        "Blanks and line ends around a key are stripped; one inside it makes an HTTP header that nobody accepts.",
        "Copy the key again in one piece.",
    ),
    Situation(
        "public-key",
        "Keys",
        "The service shall listen on all interfaces and refuses to start",
        "the default admin key works on loopback only, because everybody knows it; set rollout.agent.admin_api_key to a secret of your own",
        "Everybody who reads the documentation knows the default key, and likewise `gateway-internal-token`.",
        "Set a secret: `rollout.agent.admin_api_key='${AREAL_ADMIN_KEY}'`.",
    ),
    Situation(
        "port-taken",
        "Gateway and ports",
        "The gateway or the run ends at once",
        "port … is taken…: cannot listen on …; stop that process or choose another port (…; 0 takes a free one)",
        "Another program, perhaps an earlier gateway, listens there; the message names the process where the system tells.",
        "End it, or take another port: `--port` of the gateway, `rollout.agent.gateway_port` of a run, and `model_base_url` of the agent.",
    ),
    GATEWAY_UNREACHABLE,
    Situation(
        "gateway-died",
        "Gateway and ports",
        "`scripts/launch_async.sh` ends before training starts",
        "the gateway ended with code … before it was ready; its reason stands above, training was not started",
        "The gateway found something wrong with its configuration or its port.",
        "Read the line above it; the whole log is `logs/areal_async/gateway.log`.",
    ),
    Situation(
        "port-of-a-stranger",
        "Gateway and ports",
        "A run starts its own gateway although something listens on the port",
        "port … is held by something that is not a gateway of this user, so it is not used; give the run another port with "
        "rollout.agent.gateway_port, or stop that process",
        "A run sends nothing to a program that has not proven to be your gateway.",
        "Another port, or end that program.",
    ),
    Situation(
        "agents-other-port",
        "Gateway and ports",
        "The agent file still names port 8080",
        "model_base_url … is not the gateway's address: agents use http://…:…/gateway/v1, and the run goes on with that",
        "The address is the one the agent's model had before.",
        "Write the gateway's address into the agent's own configuration.",
    ),
    Situation(
        "gateway-serves-another",
        "Gateway and ports",
        "A second run beside the first",
        "the gateway at … serves run … (process …); stop that run, or set another rollout.agent.gateway_port",
        "One gateway serves one run at a time.",
        "`rollout.agent.gateway_port=0` takes a free port; or stop the other run.",
    ),
    Situation(
        "no-run-attached",
        "Gateway and ports",
        "503 from a gateway that was started alone",
        "no training run is attached yet; start one (python -m areal.train --config …) and retry",
        "The gateway knows no run yet, or the run has ended.",
        "Start the run; it finds the gateway by itself. Clients may simply retry.",
    ),
    Situation(
        "worker-away",
        "Gateway and ports",
        "502 from a model call",
        "worker …, which holds this session, is not reachable; check that the service runs, then retry: its sessions are kept and taken up "
        "again",
        "The rollout worker has ended or hangs.",
        "Look at the end of the run's `train.log` and `worker-0.log`. Sessions are in the store; the same command goes on from there.",
    ),
    OAUTH,
    Situation(
        "prompt-too-long",
        "Agents",
        "400 with `context_length_exceeded`",
        "prompt is too long: … tokens > … maximum; shorten the messages or serve a longer context",
        "Prompt and answer must fit `rollout.native.max_context`.",
        "Raise it together with `rollout.native.kv_tokens`, or let the agent compact earlier.",
    ),
    Situation(
        "no-slot",
        "Agents",
        "429 from start_session",
        "no free slot: … of … groups run or wait to be trained; retry in … s, end a session, or raise rollout.max_head_offpolicyness or "
        "rollout.max_concurrent_rollouts",
        "The bound on staleness lets no session begin: it would be too old when it is trained.",
        "Wait `Retry-After` seconds and try again; end the sessions that are done. Nothing is overloaded.",
    ),
    Situation(
        "nobody-rewarded",
        "Agents",
        "The reward stays at 0",
        "nobody rewarded any of the … sessions of step …, so all of them count 0; rewards are set with POST /rl/set_reward",
        "Sessions ended without set_reward; silence counts as 0.",
        "Set a reward before end_session, or let a source do it (`rollout.agent.reward_source`).",
    ),
    TAKES_TURNS,
    Situation(
        "async-lag-0",
        "Asynchronous training",
        "`async.enabled` is true, and the run takes turns all the same",
        "async.enabled is true but async.staleness_threshold is 0: generation and training alternate; raise the threshold to 1 or more for "
        "them to overlap",
        "A lag of 0 is what synchronous means.",
        "2 to begin with; see docs/async.md.",
    ),
    Situation(
        "async-no-workers",
        "Asynchronous training",
        "`async.train_workers` or `async.rollout_workers` is 0",
        "…: … must be a whole number of at least 1",
        "Without a worker of each kind nothing overlaps, nor runs at all.",
        "1 or more of both.",
    ),
    Situation(
        "async-not-worth-it",
        "Asynchronous training",
        "Asynchronous and synchronous runs are equally fast",
        "…, so asynchronous training is not worth it here: take turns, …",
        "What the run measures of itself has no idle time to gain: training dominates, or sessions last equally long.",
        "Take turns, or change what the sentence names: docs/speed.md.",
    ),
    Situation(
        "lag-is-the-limit",
        "Asynchronous training",
        "Sessions are dropped as stale, or training waits for them",
        "the lag is the limit: the longest trajectory takes … steps and rollout.max_head_offpolicyness=… loses what is older; raise it, or "
        "shorten the longest",
        "A session lasts more training steps than the lag allows.",
        "Raise `async.staleness_threshold` to what the line says, bound the session's length (`max_turns`, `max_tokens`), or choose "
        "`rollout.stale_tokens: wait` (docs/staleness.md).",
    ),
    Situation(
        "stale",
        "Asynchronous training",
        "Groups are dropped",
        "… dropped as stale since the step before (…): older than rollout.max_head_offpolicyness=…; their tasks are waited for next time",
        "They ended after the weights that sampled them were too old.",
        "The same; the tasks that lost a group are waited for by themselves.",
    ),
    Situation(
        "queue-full",
        "Asynchronous training",
        "Generation slows down",
        "the queue is full (… of … groups): raise rollout.queue_size (async.queue_max_size) or train faster (async.train_workers)",
        "Training takes less than generation makes.",
        "One of the two that it names; it is no error.",
    ),
    Situation(
        "queue-never-full",
        "Asynchronous training",
        "A warning at the start",
        "rollout.queue_size=… (async.queue_max_size) is never reached: max_head_offpolicyness=… lets … groups wait; lower the first, or "
        "raise the second",
        "(lag + 1) batches is all that may wait.",
        "Nothing breaks; take the key out, or raise the lag.",
    ),
    Situation(
        "unknown-key",
        "Configuration",
        "The run ends at once with exit code 2",
        "unknown key; did you mean …?",
        "A key is misspelt or stands in another section.",
        "Take the one it names; docs/config.md has all.",
    ),
    Situation(
        "placeholder",
        "Configuration",
        "The run ends at once with exit code 2",
        "… is still the placeholder of the text it was copied from; put your own value there",
        "A value like `your-policy-model-id` or `sk-你的key` stands where yours belongs.",
        "Put in the model id or the key of your channel.",
    ),
    Situation(
        "older-torch",
        "Configuration",
        "An environment that already had torch",
        "torch … is installed, areal is tested from torch … on; run: pip install --upgrade 'torch==…'",
        "`pip install --no-deps`, or another package, kept an older torch.",
        "The line that it prints. `ModuleNotFoundError: areal` means that `pip install -e .` did not finish: run "
        "`pip install -r requirements.txt`, then it.",
    ),
    Situation(
        "run-in-use",
        "Configuration",
        "A second start with the same names",
        "… is in use by another run (pid … on …): end that one, or choose another trial_name or --output-dir",
        "Two runs cannot write into one folder.",
        "Another `trial_name` or `--output-dir`.",
    ),
    Situation(
        "not-finite",
        "Training",
        "The run ends in the middle of a step",
        "session …: its gradient is not finite",
        "The update would have made the weights useless, so it was not applied.",
        "Look at that session (`areal export`), lower the learning rate, then start the same command again: it goes on from the last checkpoint.",
    ),
    Situation(
        "disagree",
        "Training",
        "A warning after a step",
        "trainer and sampler disagree by … in the log-prob of a token",
        "Server and trainer compute the same weights differently; in float32 on one kind of machine they should not.",
        "The same `dtype` on both sides; if it stays, report it with the run's store.",
    ),
    Situation(
        "disk-nearly-full",
        "Disk and processes",
        "503 from start_session",
        "the disk of the store … is nearly full (… MiB free): no session starts below … MiB, so that those that run can be recorded; free "
        "space, and it works again by itself",
        "What remains is kept for sessions that run.",
        "Free space; bound what is kept with `store.keep_steps`, `saver.keep`, `recover.keep` (docs/recovery.md).",
    ),
    Situation(
        "start-too-slow",
        "Disk and processes",
        "The run ends while it starts",
        "… (pid …) did not report ready within … s; raise scheduler.startup_timeout_seconds if it only needs longer. …",
        "A child process needed longer than allowed, for a large model on a slow disk, or hangs; its last lines follow.",
        "Read the lines; raise the key if they show progress.",
    ),
)
_BY_NAME = {one.name: one for one in GUIDE}
