"""The metrics of a run, declared once: what train.py writes per step and how values of several ranks combine."""

from __future__ import annotations

from areal.base.metrics import declare

declare("train/reward", "mean", "sum of the raw rewards of a session, mean over the batch's sessions")
declare("train/loss", "sum", "objective of the step")
declare("eval/reward", "mean", "reward of the held-out tasks, mean; greedy unless evaluator.temperature says otherwise")

for name, combine, description in (
    ("generated", "sum", "ended sessions of the batch of groups that was completed"),
    ("tokens", "sum", "tokens they recorded"),
    ("reward", "mean", "sum of the raw rewards of a session, mean over the sessions of these groups"),
    ("queue", "last", "finished groups waiting to be trained"),
    ("slots", "last", "groups that may open now"),
    ("running", "last", "sessions running now"),
    ("awaiting_reward", "last", "sessions that have ended and wait for the run's reward source"),
    ("version", "last", "label of the weights that are served now"),
):
    declare(f"rollout/{name}", combine, description)  # type: ignore[arg-type]

for name, combine, description in (
    ("lag_mean", "mean", "steps that a trained token's weights were behind the trained ones"),
    ("lag_max", "max", "the largest such lag; never above rollout.max_head_offpolicyness"),
    ("version", "last", "label of the weights that the step made"),
    ("sessions", "sum", "sessions in the step"),
    ("servers_out", "max", "inference servers without traffic, because they do not serve the current version"),
    ("stale_groups", "sum", "groups dropped as stale since the step before"),
    (
        "held_seconds",
        "max",
        "how long the batch was complete but for running groups that it waited for (stale_wait_seconds)",
    ),
    ("rewards_clipped", "sum", "rewards beyond rollout.agent.reward_clip, trained as that bound"),
    ("recorded_tokens", "sum", "sampled tokens of these sessions, trained or masked"),
    ("wait_seconds", "max", "time the loop waited for a batch"),
    ("entropy", "sum", "of the policy at the trained tokens, mean, in nats"),
    ("clip_ratio", "sum", "part of the trained tokens whose ratio was clipped"),
    ("dual_clip_ratio", "sum", "part of the trained tokens under the dual clip"),
    ("approx_kl", "sum", "of the policy from the proximal one, mean of r - 1 - log r over the trained tokens, in nats"),
    ("behave_weight_mean", "sum", "weight proximal / behaviour, mean"),
    ("behave_weight_max", "max", "the same, largest"),
    ("rejected_ratio", "sum", "part of the trained tokens that actor.rejection_sampling left out"),
    ("ref_kl", "sum", "of the policy from the reference, by actor.kl_estimator, mean over the trained tokens, in nats"),
    ("teacher_kl", "sum", "mean of log policy - log teacher over the trained tokens, in nats"),
    ("critic_loss", "sum", "the critic's clipped squared error, half its mean over the trained tokens"),
    ("critic_clip_ratio", "sum", "part of the trained tokens whose value loss was flat"),
    ("critic_value_error", "sum", "of the critic's values from the returns, mean of the absolute differences"),
    ("critic_grad_norm", "max", "global gradient norm of the critic before clipping"),
    ("critic_lr", "last", "learning rate of the critic's step"),
    ("screened_tokens", "sum", "trained tokens that the algorithm left out (m2po)"),
    ("moe_load_max", "max", "tokens of the most used expert of any layer, as a multiple of the mean"),
    ("moe_load_min", "min", "tokens of the least used expert of any layer, as a multiple of the mean"),
    (
        "moe_aux_loss",
        "mean",
        "how unevenly experts are used, 1 per sparse layer at best; actor.moe_aux_loss times it was trained on",
    ),
    ("grad_norm", "max", "global gradient norm before clipping"),
    ("lr", "last", "learning rate of the step"),
    ("updates", "max", "optimizer updates of the step"),
    ("rows", "sum", "training rows"),
    ("skipped_rows", "sum", "rows whose advantages are all 0 and need no forward pass"),
    ("trained_tokens", "sum", "tokens with an advantage"),
    ("computed_tokens", "sum", "tokens that went through the net; shared prefixes once"),
    ("row_tokens", "sum", "tokens of the computed rows, shared prefixes each time"),
    ("logprob_gap_max", "max", "largest |recomputed - recorded log-prob| among tokens of the current version"),
    ("logprob_gap_mean", "mean", "the same, mean"),
    ("logprob_gap_tokens", "sum", "how many tokens that compares"),
    ("seconds", "max", "of the rank's own work"),
    ("step_seconds", "max", "from the wait to the published version"),
):
    declare(f"train/{name}", combine, description)  # type: ignore[arg-type]

declare("throughput/samples_per_second", "sum", "trained sessions per second over the last log_interval steps")
declare("throughput/tokens_per_second", "sum", "sampled tokens of trained sessions per second over the same")

declare(
    "checkpoint/held_seconds",
    "max",
    "how long training waited for the checkpoint: the copy in memory, and one before it",
)
declare("checkpoint/write_seconds", "max", "how long it was then written beside training")
declare("checkpoint/bytes", "sum", "its tensors")
declare("checkpoint/failed", "sum", "checkpoints that could not be written")

for name, combine, description in (
    (
        "generate_seconds",
        "last",
        "of a step on the whole machine with every slot busy; of the last ten steps, as all of speed/",
    ),
    ("train_seconds", "last", "of a step on the whole machine, with publishing"),
    ("tail_seconds", "last", "idle at the end of a batch where generating and training take turns"),
    ("cv", "last", "standard deviation / mean of the sessions' durations"),
    ("waves", "last", "sessions per step and slot"),
    ("gain", "last", "predicted speed side by side / taking turns"),
    ("train_share", "last", "part of the machine that trains in the best split"),
    ("longest_steps", "last", "steps that pass while the longest session runs"),
):
    declare(f"speed/{name}", combine, description)  # type: ignore[arg-type]
