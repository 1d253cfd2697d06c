"""Keys that people bring from other trainers' configurations and that say something here by another key: told, never guessed.

    said_by("actor.use_sapo_loss")           # "here that is actor.algorithm=sapo"; None for every other key

A sentence for whoever wrote the key; nothing is translated. Used by tree.py for unknown keys.
"""

from __future__ import annotations

ELSEWHERE: dict[str, str] = {
    "actor.use_sapo_loss": "actor.algorithm=sapo",
    "actor.importance_sampling_level": "actor.algorithm=gspo (sequence) or any other (token)",
    "actor.reward_norm": "the choice of actor.algorithm: grpo (group mean and std), dr_grpo (mean alone), lite_ppo (batch std), rloo (leave one out)",
    "actor.adv_norm": "part of actor.algorithm: ppo with a critic and reinforce_plus_plus normalise over the batch",
    "actor.recompute_logprob": "actor.prox_logp_method=recompute, which is the default",
    "actor.ppo_n_minibatches": "actor.mini_batch_size, in sequences",
    "actor.overlong_reward_penalty": "actor.overlong_tokens, in tokens before gconfig.max_new_tokens",
    "actor.behave_imp_weight_cap": "actor.rejection_sampling.upper, with action=clamp",
    "actor.behave_imp_weight_mode": "actor.rejection_sampling.level and .action",
    "saver.mode": "nothing to choose: every checkpoint is written beside training",
    "recover.no_save_optim": "saver, which keeps models alone; what a run goes on from has its optimizer",
    "recover.no_load_optim": "another run (trial_name) with actor.path set to the saved model",
    "dynamic_bs": "actor.dynamic_sampling",
}
"""Key or section -> what says it here."""


def said_by(path: str) -> str | None:
    """A sentence about this key, or about the section it stands in; None where there is nothing to say."""
    for known, here in ELSEWHERE.items():
        if path == known or path.startswith(f"{known}."):
            return f"here that is {here}"
    return None
