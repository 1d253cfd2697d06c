#!/usr/bin/env bash
# Gateway, then training, then the gateway goes again: also when training fails, on Ctrl-C and on SIGTERM.
#
#   export TAOTOKEN_API_KEY=…                    the key of the upstream channel (configs/taotoken_router.yaml)
#   bash scripts/launch_async.sh [KEY=VALUE …]   overrides are passed on to areal.train
#
# GATEWAY_PORT (9000), ROUTER_CONFIG, TRAIN_CONFIG, AGENT_CONFIG, OUTPUT_DIR and PYTHON change what the names say.
# Training starts when the gateway answers /health, not after a fixed time; a gateway that fails to start, or ends while training runs, ends
# the script. The same command goes on from the last checkpoint.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-$([[ -z ${VIRTUAL_ENV:-} && -x .venv/bin/python ]] && echo .venv/bin/python || echo python)}
port=${GATEWAY_PORT:-9000}
gateway_log=logs/areal_async/gateway.log
ready_within_s=60
gateway_pid=
train_pid=

stop() { # SIGTERM lets a process finish what runs; waiting for it leaves nothing behind
  local pid=$1
  if [[ -n $pid ]] && kill -TERM "$pid" 2>/dev/null; then
    wait "$pid" 2>/dev/null || true
  fi
}

finish() {
  local code=$?
  trap - EXIT
  trap '' INT TERM # a second Ctrl-C must not leave a process behind
  stop "$train_pid"
  stop "$gateway_pid"
  exit "$code"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

answers() { # whether /health is answered on the port by the process $1, and not by an older one
  "$python" -c '
import json, sys, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
try:
    with opener.open(f"http://127.0.0.1:{sys.argv[1]}/health", timeout=2) as answer:
        sys.exit(json.load(answer).get("pid") != int(sys.argv[2]))
except (OSError, ValueError):
    sys.exit(1)' "$port" "$1"
}

# 1. the gateway
"$python" -m areal.gateway.server \
  --config "${ROUTER_CONFIG:-configs/taotoken_router.yaml}" \
  --port "$port" \
  --log-level info &
gateway_pid=$!
echo "Gateway started, PID=$gateway_pid"

# 2. until it is ready
while true; do
  if ! kill -0 "$gateway_pid" 2>/dev/null; then
    code=0
    wait "$gateway_pid" || code=$?
    gateway_pid=
    echo "the gateway ended with code $code before it was ready; its reason stands above, training was not started" >&2
    exit 1
  fi
  answers "$gateway_pid" && break
  if ((SECONDS >= ready_within_s)); then
    echo "the gateway did not answer on port $port within $ready_within_s s; see $gateway_log" >&2
    exit 1
  fi
  sleep 0.2
done

# 3. training; in the background, so that a signal to this script is heard while it runs
"$python" -m areal.train \
  --config "${TRAIN_CONFIG:-configs/agent_async_train.yaml}" \
  --agent-config "${AGENT_CONFIG:-agent_config.py}" \
  --output-dir "${OUTPUT_DIR:-./checkpoints/run_001}" \
  "$@" ${GATEWAY_PORT:+rollout.agent.gateway_port="$port"} &
train_pid=$!
code=0
wait -n "$train_pid" "$gateway_pid" || code=$?
if kill -0 "$train_pid" 2>/dev/null; then # it is the gateway that has ended, and no agent can reach the run any more
  gateway_pid=
  echo "local proxy failed, gateway at localhost:$port not reachable: it ended with code $code while training ran; its log, $gateway_log, ends with" >&2
  tail -n 8 "$gateway_log" >&2 || true
  echo "training is stopped after this step; the same command goes on from there" >&2
  exit 1
fi
train_pid=
exit "$code" # 4. the gateway is stopped by the trap above
