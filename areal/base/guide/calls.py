"""What clients, agents and the gateway hear."""

from __future__ import annotations

from areal.base.guide.situation import Situation

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

CALLS: tuple[Situation, ...] = (
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
        "Look at the end of the run's `train.log` and `worker-0.log`. A worker that died is in the log, and the run has begun again by itself; where it has ended, the same command goes on. Sessions are in the store.",
    ),
    Situation(
        "channel-key",
        "Upstream channel",
        "`openai.AuthenticationError: Error code: 401 - … Invalid API key` from the channel",
        "Invalid API key: the channel refuses the key in api_gateway.api_key (…); check the variable that it is read from",
        "The key is another one, was copied with something around it, or has expired.",
        "`echo $TAOTOKEN_API_KEY` in the shell that starts the gateway; `api_key: ${TAOTOKEN_API_KEY}` in the router file, not the text of it; "
        "then `python scripts/check_channel.py`, which says which of key, base_url and model id is wrong.",
    ),
    Situation(
        "channel-model",
        "Upstream channel",
        "404 from the channel",
        "the channel does not find … (…); check model_routing.….model_id=… and api_gateway.base_url",
        "The model id is not one of the channel's, or the address leads elsewhere.",
        "Copy the id from the channel's list of models; check_channel.py tries it.",
    ),
    Situation(
        "no-choices",
        "Upstream channel",
        "`KeyError: 'choices'`, or an answer without `choices`",
        "the channel answered … with …; check api_gateway.base_url and model_routing.….model_id=…, or ask the channel's provider",
        "The channel said 200 and sent an error, an empty list or a web page; the message shows what. It is never taken for an answer, nor scored.",
        "`python scripts/check_channel.py` prints the whole body. Usually the base_url leads to a web page, or the model id is wrong.",
    ),
    Situation(
        "channel-unreachable",
        "Upstream channel",
        "502 from a reward or judge call",
        "the channel is not reachable (…); check api_gateway.base_url and that this host gets there",
        "No connection to the channel from this host. Proxies of the environment are honoured for the channel, and only for it.",
        "Try the address with curl from the same shell; set HTTPS_PROXY if this host needs one.",
    ),
    Situation(
        "channel-slow",
        "Upstream channel",
        "504 from a reward or judge call",
        "the channel sent nothing for … within … s; raise model_routing.….timeout, or retry later",
        "The model needs longer than the route allows.",
        "A `timeout` of its own for that route; generation and training do not wait for it.",
    ),
    Situation(
        "channel-rate",
        "Upstream channel",
        "429 from the channel",
        "the channel limits the rate of … (…); retry later, or lower model_routing.….concurrency",
        "More calls than your plan allows; the gateway has already tried again as often as `max_retries` says.",
        "Lower `concurrency`, or set `calls_per_minute` of the route.",
    ),
    Situation(
        "channel-broken",
        "Upstream channel",
        "503 for every reward or judge call",
        "… failed … times in a row and is left alone for a while; retry later, check the channel (python scripts/check_channel.py), or set "
        "api_gateway.breaker_failures=0",
        "The route's circuit breaker is open, so that a dead model costs no time.",
        "It is tried again by itself; find out with check_channel.py what is wrong.",
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
    Situation(
        "rewards-away",
        "Rewards",
        "No session starts; start_session answers 429 with this reason",
        "… gives no rewards since … (…); …",
        "The reward model, the judge or your function's service answers nobody. Sessions that have ended keep waiting for their reward; nothing "
        "is dropped.",
        "What the sentence ends with; the run goes on by itself as soon as it answers, and says so.",
    ),
    Situation(
        "rewards-failed",
        "Rewards",
        "Sessions are dropped as `reward_failed`",
        "no reward from … for …, dropped (reward_failed): …",
        "The source answered, but not with a reward: garbage, a number out of `bounds`, or an exception of your function, as often as `attempts` "
        "says.",
        "Look at the reason and at a prompt of that session; correct `parser`, `prompt` or the function (docs/rewards.md).",
    ),
)
