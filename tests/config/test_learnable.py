"""A configuration that could not learn, or says something in vain, is told so before it starts, with the remedy (T069)."""

from __future__ import annotations

import re

import pytest

from areal.base.errors import ConfigError
from areal.config.algorithms import TRAITS, algorithm_name, filled_in, ignored, resolved
from areal.config.elsewhere import ELSEWHERE, said_by
from areal.config.keys import paths_of
from areal.config.load import load_config
from areal.config.run import RunConfig
from areal.config.startable import why_not

GROUPED = ("gconfig.n_samples=4",)


def load(*overrides: str) -> RunConfig:
    return load_config(None, ["actor.path=tiny", "rollout.agent.mode=online", *overrides])


@pytest.mark.parametrize("name", sorted(name for name, traits in TRAITS.items() if traits.compares == "group"))
def test_T069_a_comparison_within_groups_of_one_is_refused(name: str) -> None:
    needed = ["gconfig.max_new_tokens=64", *(["teacher.path=tiny"] if name == "distill" else [])]
    [reason] = why_not(load(f"actor.algorithm={name}", *needed))
    assert reason.startswith(
        f"actor.algorithm={name} compares the samples of a task with each other, and gconfig.n_samples=1"
    )
    alone = "teacher.rl_loss_weight=0 to learn of the teacher alone" if name == "distill" else "actor.algorithm=ppo"
    assert reason.endswith(f"Set gconfig.n_samples to 2 or more, or {alone}")
    assert why_not(load(f"actor.algorithm={name}", *needed, *GROUPED)) == []


@pytest.mark.parametrize("name", ["auto", "ppo", "reinforce", "reinforce_plus_plus"])
def test_groups_of_one_are_fine_where_nothing_is_compared_within(name: str) -> None:
    assert why_not(load(f"actor.algorithm={name}")) == []


def test_a_step_of_one_session_has_nothing_to_compare() -> None:
    [reason] = why_not(load("train_dataset.batch_size=1"))
    assert "there is one: every advantage would be 0" in reason
    assert why_not(load("train_dataset.batch_size=1", "actor.algorithm=reinforce")) == []


@pytest.mark.parametrize(
    ("name", "override", "said"),
    [
        ("grpo", "actor.m2_threshold=0.1", "actor.m2_threshold=0.1: grpo does not use it"),
        ("sapo", "actor.eps_clip=0.1", "actor.eps_clip=0.1: sapo does not use it"),
        ("sapo", "actor.use_decoupled_loss=true", "actor.use_decoupled_loss=True: sapo does not use it"),
        ("reinforce", "actor.c_clip=3", "actor.c_clip=3.0: reinforce does not use it"),
        ("ppo", "actor.dynamic_sampling=true", "actor.dynamic_sampling=True: ppo does not use it"),
        ("sapo", "actor.rejection_sampling.upper=2", "actor.rejection_sampling: sapo does not use it"),
        ("m2po", "actor.prox_logp_method=loglinear", "actor.prox_logp_method=loglinear: m2po does not use it"),
    ],
)
def test_a_key_that_the_algorithm_ignores_is_refused(name: str, override: str, said: str) -> None:
    [reason] = why_not(load(f"actor.algorithm={name}", override, *GROUPED))
    assert reason.startswith(said)
    assert "take it out, or set actor.algorithm to one of" in reason


def test_saying_what_holds_anyway_is_no_mistake() -> None:
    assert ignored(load("actor.algorithm=sapo", "actor.use_decoupled_loss=false", *GROUPED)) == []
    assert ignored(load("actor.algorithm=ppo", "actor.dynamic_sampling=false")) == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["actor.loss_aggregation=fixed_length"], "divides by gconfig.max_new_tokens; set that"),
        (["actor.algorithm=dr_grpo"], "divides by gconfig.max_new_tokens; set that"),
        (["actor.overlong_tokens=9"], "are the last tokens before gconfig.max_new_tokens=null"),
        (["actor.overlong_tokens=9", "gconfig.max_new_tokens=8"], "before gconfig.max_new_tokens=8"),
        (["actor.overlong_penalty_factor=2"], "nothing is punished; set actor.overlong_tokens too"),
        (["actor.rejection_sampling.metric=kl_k3"], "a KL is no weight that could be clamped; set action=mask"),
        (
            ["actor.rejection_sampling.agg=max"],
            "level=token judges each by itself: set level=sequence, or take agg out",
        ),
        (["actor.rejection_sampling.lower=6"], "lower=6.0 is not below upper=5.0: every token would be left out"),
        (["actor.use_decoupled_loss=false", "actor.rejection_sampling.upper=2"], "has no such weight; take one out"),
        (
            ["actor.use_decoupled_loss=false", "actor.prox_logp_method=loglinear"],
            "has no proximal policy; take one out",
        ),
        (
            ["gconfig.temperature=0", "rollout.agent.sampling=policy"],
            "every token is greedy, and those are never trained",
        ),
    ],
)
def test_what_contradicts_itself_is_one_sentence(overrides: list[str], said: str) -> None:
    [reason] = why_not(load(*overrides, *GROUPED))
    assert said in reason


def test_own_values_are_filled_in_and_the_user_s_win() -> None:
    dapo = resolved(load("actor.algorithm=dapo", "gconfig.max_new_tokens=100", *GROUPED))
    assert (dapo.eps_clip, dapo.eps_clip_higher, dapo.dynamic_sampling, dapo.overlong_tokens) == (0.2, 0.28, True, 20)
    assert resolved(load("actor.algorithm=dapo", *GROUPED)).overlong_tokens is None
    ours = resolved(load("actor.eps_clip=0.4"))
    assert (ours.algorithm, ours.eps_clip, ours.eps_clip_higher, ours.loss_aggregation) == (
        "ppo",
        0.4,
        0.4,
        "token_mean",
    )
    assert resolved(load("actor.algorithm=gspo", "actor.loss_aggregation=token_mean")).loss_aggregation == "token_mean"
    assert resolved(load(*GROUPED)).algorithm == "grpo"


def test_the_shipped_configurations_can_learn() -> None:
    from pathlib import Path

    root = Path(__file__).resolve().parents[2]
    for file in ("examples/math_agent/config.yaml", "examples/openclaw/config.yaml", "configs/tiny.yaml"):
        assert why_not(load_config(root / file)) == [], file


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["actor.kl_ctl=0.1"], "actor.kl_ctl=0.1 needs a reference policy: set ref.path"),
        (["ref.path=tiny"], "nothing asks the reference while actor.kl_ctl=0"),
        (["actor.kl_estimator=k2"], "there is no KL while actor.kl_ctl=0"),
        (
            ["ref.path=tiny", "actor.kl_ctl=0.1", "actor.kl_estimator=k1"],
            "the gradient of k1 is zero in the mean; use k2 or k3",
        ),
        (["critic.path=tiny", "actor.algorithm=grpo"], "has no use for values; set actor.algorithm=ppo"),
        (["teacher.path=tiny"], "asks no teacher; set actor.algorithm=distill"),
        (["actor.algorithm=distill"], "actor.algorithm=distill needs a teacher: set teacher.path"),
        (["actor.algorithm=distill", "teacher.rl_loss_weight=0"], "teacher.path is empty"),
        (
            ["actor.gae_lambda=0.9"],
            "actor.gae_lambda=0.9: grpo does not use it (docs/algorithms.md); take it out, or configure a critic",
        ),
        (["actor.discount=0.9"], "actor.discount=0.9: grpo does not use it"),
    ],
)
def test_a_net_that_is_missing_or_asked_by_nobody_is_one_sentence(overrides: list[str], said: str) -> None:
    [reason] = why_not(load(*overrides, *GROUPED))
    assert said in reason


def test_nets_that_are_asked_start() -> None:
    assert why_not(load("ref.path=tiny", "actor.kl_ctl=0.1", *GROUPED)) == []
    assert why_not(load("critic.path=tiny", "actor.gae_lambda=0.9", "actor.discount=0.9", *GROUPED)) == []
    reward = ["ref.path=tiny", "actor.kl_ctl=0.1", "actor.kl_estimator=k1"]
    assert why_not(load(*reward, "actor.algorithm=reinforce_plus_plus", "actor.discount=0.9")) == []
    assert why_not(load(*reward, "critic.path=tiny", "critic.backend=fsdp:d2", "ref.backend=archon:d2")) == []
    assert why_not(load("actor.algorithm=distill", "teacher.path=tiny", "teacher.rl_loss_weight=0")) == []
    assert algorithm_name(load("critic.path=tiny", *GROUPED)) == "ppo"


def test_the_kl_is_estimated_where_it_belongs() -> None:
    assert resolved(load("ref.path=tiny", "actor.kl_ctl=0.1", *GROUPED)).kl_estimator == "k3"
    assert resolved(load("ref.path=tiny", "actor.kl_ctl=0.1", "critic.path=tiny")).kl_estimator == "k1"


def test_what_open_keys_mean_is_a_sentence() -> None:
    said = filled_in(load("actor.eps_clip=0.3", *GROUPED))
    assert said == (
        "actor.algorithm=auto runs grpo with its own dynamic_sampling=False, eps_clip_higher=0.3, prox_logp_method=recompute, "
        "use_decoupled_loss=True, loss_aggregation=token_mean"
    )
    dapo = filled_in(load("actor.algorithm=dapo", "gconfig.max_new_tokens=100", *GROUPED))
    assert "dynamic_sampling=True, eps_clip=0.2, eps_clip_higher=0.28" in dapo
    assert dapo.endswith("overlong_tokens=20")


@pytest.mark.parametrize(
    ("override", "here"),
    [
        ("actor.use_sapo_loss=true", "here that is actor.algorithm=sapo"),
        ("actor.reward_norm.mean_level=group", "here that is the choice of actor.algorithm"),
        ("dynamic_bs=true", "here that is actor.dynamic_sampling"),
    ],
)
def test_a_key_of_another_trainer_says_what_it_is_here(override: str, here: str) -> None:
    with pytest.raises(ConfigError, match=here):
        load(override)


def test_what_says_it_here_exists() -> None:
    words = {word for text in ELSEWHERE.values() for word in re.findall(r"(?:actor|gconfig)\.[a-z_.]*[a-z_]", text)}
    assert words <= paths_of(RunConfig)
    assert not {path for path in paths_of(RunConfig) if said_by(path)}


def test_what_balances_experts_is_refused_where_nothing_would() -> None:
    reasons = why_not(load("actor.moe_aux_loss=0.01", "actor.moe_bias_rate=0.01", *GROUPED))
    assert [reason for reason in reasons if "moe" in reason] == [
        f"actor.{key}=0.01: actor.backend=fsdp:d1 does not use it; take it out, or use archon"
        for key in ("moe_aux_loss", "moe_bias_rate")
    ]
    reasons = why_not(load("actor.backend=archon:d1", "actor.moe_aux_loss=0.01", "actor.moe_bias_rate=0.01", *GROUPED))
    assert not [reason for reason in reasons if "moe" in reason]


def test_an_adapter_needs_the_engine_that_has_them() -> None:
    assert why_not(load("actor.lora.rank=8", "actor.backend=fsdp:d2", *GROUPED)) == []
    [reason] = why_not(load("actor.lora.rank=8", "actor.backend=fsdp:d2t2", *GROUPED))
    assert "actor.backend=fsdp:d2t2 trains all weights and has no adapters; set actor.backend=fsdp:d4" in reason
    [reason] = why_not(load("actor.lora.rank=8", "actor.backend=archon:t2", *GROUPED))
    assert reason.startswith("actor.lora: actor.backend=archon:t2 trains all weights and has no adapters; set")
