"""Start a session, or refresh one: python start_session.py URL [--admin-key K] [--task-id T] [--api-key K]

stdout is for people; stderr carries SESSION_API_KEY=… and SESSION_ID=… for scripts. Exit 1 on any failure.
"""

import argparse
import os
import sys

from _service import call, die, say


def main() -> None:
    parser = argparse.ArgumentParser(description="Start or refresh an RL session.")
    parser.add_argument("url", help="the gateway, for example http://127.0.0.1:8090")
    parser.add_argument("--admin-key", default=os.environ.get("ADMIN_KEY", "areal-admin-key"))
    parser.add_argument("--task-id", default=os.environ.get("TASK_ID", "demo-task"))
    parser.add_argument("--api-key", default=os.environ.get("SESSION_API_KEY"), help="key of the session to refresh")
    args = parser.parse_args()
    refresh = bool(args.api_key)
    say("Refresh session" if refresh else "Start session", args.url)
    body = {"task_id": args.task_id, "api_key": args.api_key}
    # A refresh waits up to 120 s on the server for a free slot.
    status, answer = call(args.url, "/rl/start_session", args.admin_key, body, timeout_s=130 if refresh else 10)
    if status == 429 and refresh:
        die(
            "no slot within the time-out: training has to catch up. The old session has ended; the key stays good, try again."
        )
    if status == 429:
        die("no free slot: training has to catch up first. Try again in a few seconds.")
    if status != 200:
        die(answer)
    say("session", answer["session_id"])
    say("key", answer["api_key"])
    if not refresh:
        print(f"\n  export OPENAI_API_KEY={answer['api_key']}\n  export OPENAI_BASE_URL={args.url.rstrip('/')}/v1\n")
    admin = "" if args.admin_key == parser.get_default("admin_key") else " --admin-key …"
    print(f"next episode:  python {sys.argv[0]} {args.url}{admin} --api-key {answer['api_key']}")
    say("SESSION_API_KEY", answer["api_key"], script=True)
    say("SESSION_ID", answer["session_id"], script=True)


if __name__ == "__main__":
    main()
