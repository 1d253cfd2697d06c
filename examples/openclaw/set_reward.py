"""Reward the last answer, or one of them: python set_reward.py URL --api-key K [--reward 1.0] [--interaction-id I]"""

import argparse
import os

from _service import call, die, say


def main() -> None:
    parser = argparse.ArgumentParser(description="Set the reward of an answer.")
    parser.add_argument("url")
    parser.add_argument("--api-key", default=os.environ.get("SESSION_API_KEY"), help="the session's key")
    parser.add_argument("--reward", type=float, default=float(os.environ.get("REWARD", "1.0")))
    parser.add_argument("--interaction-id", default=None, help="the id of the answer; default: the last one")
    args = parser.parse_args()
    if not args.api_key:
        die("no session key: give --api-key or set SESSION_API_KEY (start_session.py prints it)")
    body = {"reward": args.reward, "interaction_id": args.interaction_id}
    status, answer = call(args.url, "/rl/set_reward", args.api_key, body, timeout_s=10)
    if status != 200:
        die(answer)
    say("reward", args.reward)


if __name__ == "__main__":
    main()
