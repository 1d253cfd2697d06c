#!/usr/bin/env bash
# Many sessions, several at once: each starts with a key of its own, asks its question, is rewarded and ends. 429 is waited for.
#
#   bash scripts/sample_batch.sh http://127.0.0.1:8090                        8 sessions, 4 at once
#   SESSIONS=64 AT_ONCE=16 PROMPTS=questions.txt REWARD_COMMAND="python reward.py" bash scripts/sample_batch.sh URL
#   sbatch --array=0-31 scripts/sample_batch.sh http://head-node:8090         32 jobs, 8 sessions each
#
# ADMIN_KEY       opens start_session (areal-admin-key)
# TASK            task ids are TASK-0, TASK-1, … (sample); SAME_TASK=1 gives all of them TASK, for gconfig.n_samples above 1
# PROMPT          the question; or PROMPTS, a file with one question a line, taken in turn
# REWARD          the same number for everybody (1.0); or REWARD_COMMAND, which reads the answer's text, finds the question in
#                 $PROMPT and prints a number
# MAX_TOKENS, TEMPERATURE   of each answer, where they are set
# GIVE_UP_S       how long a session waits for a slot (600)
# Under Slurm the number of the array's job is part of the task ids. Needs curl and python3. Exit code 1 if a session failed.
set -euo pipefail

url=${1:-http://127.0.0.1:8090}
url=${url%/}
sessions=${SESSIONS:-8}
at_once=${AT_ONCE:-4}
task=${TASK:-sample}${SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}
admin_key=${ADMIN_KEY:-areal-admin-key}
give_up_s=${GIVE_UP_S:-600}
prompts=("${PROMPT:-12 * 15 + 3 = ?}")
[[ -z ${PROMPTS:-} ]] || mapfile -t prompts <"$PROMPTS"
((${#prompts[@]})) || { echo "$PROMPTS holds no question; write one on each line" >&2; exit 2; }

call() { # call KEY PATH BODY SECONDS: sets status (000: no answer), body, retry_after. The key stands on no command line.
  local answer
  status=000 body= retry_after=
  if ! answer=$(curl --silent --show-error --include --noproxy '*' --max-time "$4" -H @- -H 'Expect:' \
    -H 'Content-Type: application/json' --data-binary @<(printf %s "$3") "$url$2" <<<"Authorization: Bearer $1" 2>&1); then
    body=$answer
    return
  fi
  local head=${answer%%$'\r\n\r\n'*}
  body=${answer#*$'\r\n\r\n'}
  read -r _ status _ <<<"$head"
  retry_after=$(sed -n 's/^[Rr]etry-[Aa]fter: *\([0-9]*\).*/\1/p' <<<"$head")
}

find_in() { # find_in NAME …: that part of the JSON in body
  python3 -c '
import json, sys
try:
    found = json.load(sys.stdin)
    for name in sys.argv[1:]:
        found = found[int(name) if isinstance(found, list) else name]
except (ValueError, LookupError, TypeError):
    sys.exit(1)
print(found)' "$@" <<<"$body" || failed "an answer without $*"
}

question() { # the body of the model call
  python3 -c '
import json, os, sys
call = {"model": "default", "messages": [{"role": "user", "content": sys.argv[1]}]}
for name, kind in (("MAX_TOKENS", int), ("TEMPERATURE", float)):
    if os.environ.get(name):
        call[name.lower()] = kind(os.environ[name])
print(json.dumps(call))' "$1"
}

failed() { # failed WHAT: a sentence, and the session is given up
  echo "session $number: $1: HTTP $status $(tr -s '\r\n' ' ' <<<"$body" | cut -c1-300)" >&2
  [[ -z ${key:-} ]] || call "$key" /rl/end_session '{}' 60
  exit 1
}

session() { # one session from its start to its end
  local number=$1 key= reward answer PROMPT=${prompts[$1 % ${#prompts[@]}]}
  local id=$task-$number waiting_since=$SECONDS waits=
  [[ -z ${SAME_TASK:-} ]] || id=$task
  while true; do
    call "$admin_key" /rl/start_session "{\"task_id\": \"$id\"}" 60
    [[ $status != 200 ]] || break
    # no slot until training has caught up, or a service that is about to be there
    [[ $status == 429 || $status == 503 ]] && ((SECONDS - waiting_since < give_up_s)) || failed "start_session"
    [[ -n $waits ]] || echo "session $number waits: HTTP $status, again every ${retry_after:-2} s" >&2
    waits=1
    sleep "${retry_after:-2}.$((RANDOM % 10))" # not all of them in the same moment
  done
  key=$(find_in api_key)
  call "$key" /chat/completions "$(question "$PROMPT")" 3600
  [[ $status == 200 ]] || failed "chat"
  answer=$(find_in choices 0 message content)
  reward=${REWARD:-1.0} # a number, as JSON has it
  if [[ -n ${REWARD_COMMAND:-} ]]; then
    reward=$(PROMPT=$PROMPT bash -c "$REWARD_COMMAND" <<<"$answer") || { body=$reward; failed "REWARD_COMMAND"; }
  fi
  call "$key" /rl/set_reward "{\"reward\": $reward}" 60
  [[ $status == 200 ]] || failed "set_reward $reward"
  call "$key" /rl/end_session '{}' 60
  [[ $status == 200 ]] || failed "end_session"
  echo "$id: reward $reward"
}

bad=0
trap 'kill $(jobs -p) 2>/dev/null; exit 130' INT TERM # sessions that are cut off end by their time-out
for ((k = 0; k < sessions; k++)); do
  if ((k >= at_once)); then
    wait -n || bad=$((bad + 1))
  fi
  session "$k" &
done
for ((k = 0; k < (sessions < at_once ? sessions : at_once); k++)); do
  wait -n || bad=$((bad + 1))
done
echo "$((sessions - bad)) of $sessions sessions ended well"
((bad == 0))
