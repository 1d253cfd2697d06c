"""The whole life of a fixed key: start, chat, reward, refresh, … python demo_lifecycle.py [URL] --episodes 2"""

import argparse

from _service import call, die, say


def main() -> None:
    parser = argparse.ArgumentParser(description="Several episodes under one key.")
    parser.add_argument("url", nargs="?", default="http://localhost:8090")
    parser.add_argument("--admin-key", default="areal-admin-key")
    parser.add_argument("--task-id", default="demo-task")
    parser.add_argument("--reward", type=float, default=1.0)
    parser.add_argument("--model", default="default")
    parser.add_argument("--prompt", default="Solve step by step: What is 12 * 15 + 3?")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--episodes", type=int, default=2)
    args = parser.parse_args()

    status, health = call(args.url, "/health", args.admin_key, None, timeout_s=10)
    if status != 200:
        die(health)
    say("workers", health["workers"])
    key = None
    for episode in range(args.episodes):
        body = {"task_id": args.task_id, "api_key": key}
        status, session = call(args.url, "/rl/start_session", args.admin_key, body, timeout_s=130 if key else 10)
        if status != 200:
            die(session)
        key = session["api_key"]
        say(f"episode {episode + 1}", session["session_id"])
        messages = [{"role": "system", "content": "You are a patient tutor."}, {"role": "user", "content": args.prompt}]
        chat = {"model": args.model, "messages": messages, "temperature": 0.7, "max_tokens": args.max_tokens}
        status, answer = call(args.url, "/chat/completions", key, chat, timeout_s=300)
        if status != 200:
            die(answer)
        say("answer", answer["choices"][0]["message"]["content"])
        status, done = call(args.url, "/rl/set_reward", key, {"reward": args.reward}, timeout_s=10)
        if status != 200:
            die(done)
        say("reward", args.reward)
    status, done = call(args.url, "/rl/end_session", key or "", {}, timeout_s=10)
    if status != 200:
        die(done)
    say("interactions of the last episode", done["interaction_count"])


if __name__ == "__main__":
    main()
