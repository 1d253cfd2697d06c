"""What a run says: whether it overlaps, its configuration, its steps, its disk."""

from __future__ import annotations

from areal.base.guide.situation import Situation

TAKES_TURNS = Situation(
    "async-off",
    "Asynchronous training",
    "Training is not faster than before; `[rollout]` and `[train]` alternate with equal steps",
    "async.enabled is false: generation and training take turns; set it to true for them to overlap",
    "The switch is off, so the run is synchronous whatever the other numbers say.",
    "`async.enabled: true` (or `rollout.max_head_offpolicyness` above 0). `areal compare` shows what it gains.",
)


RUNS: tuple[Situation, ...] = (
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
        "Put in the model id or the key; scripts/check_channel.py tries them.",
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
        "Free space; bound what is kept with `store.keep_steps`, `saver.keep` (docs/recovery.md).",
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
