"""The sparse layers of our own net against transformers', the load that routers count, and choices that are forced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from areal.models.decoder import Attend, Decoder
from areal.models.dense_config import DenseConfig, Rope
from areal.models.experts import Experts, Router, Routing, SparseMlp

LENGTHS = (7, 5, 1, 9)
VOCABULARY, EXPERTS, CHOSEN = 61, 8, 2


def config(**changes: Any) -> DenseConfig:
    return DenseConfig(
        **{
            "family": "qwen3_moe",
            "vocab_size": VOCABULARY,
            "hidden": 32,
            "layers": 3,
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 8,
            "intermediate": 48,
            "norm_eps": 1e-6,
            "qkv_bias": False,
            "o_bias": False,
            "qk_norm": True,
            "tied": False,
            "rope": Rope(),
            "max_positions": 64,
            "experts": EXPERTS,
            "experts_per_token": CHOSEN,
            "moe_intermediate": 16,
            "norm_topk": True,
            "dense_layers": (1,),
        }
        | changes
    )


def transformers_model(norm_topk: bool) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(3)
    own = config()
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=own.vocab_size,
            hidden_size=own.hidden,
            intermediate_size=own.intermediate,
            num_hidden_layers=own.layers,
            num_attention_heads=own.heads,
            num_key_value_heads=own.kv_heads,
            head_dim=own.head_dim,
            num_experts=own.experts,
            num_experts_per_tok=own.experts_per_token,
            moe_intermediate_size=own.moe_intermediate,
            norm_topk_prob=norm_topk,
            mlp_only_layers=list(own.dense_layers),
            tie_word_embeddings=False,
        )
    )
    for name, p in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            torch.nn.init.normal_(p, std=0.3)
    return model.eval()


def ours_in_their_names(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers has gate and up in one tensor."""
    theirs = {name: tensor for name, tensor in named.items() if ".experts." not in name}
    for name, gate in named.items():
        if name.endswith("experts.gate_proj"):
            stem = name.removesuffix("gate_proj")
            theirs[f"{stem}gate_up_proj"] = torch.cat([gate, named[f"{stem}up_proj"]], dim=1)
            theirs[f"{stem}down_proj"] = named[f"{stem}down_proj"]
    return theirs


def load(decoder: Decoder, model: Any) -> None:
    state = model.state_dict()
    for name in [name for name in state if name.endswith("gate_up_proj")]:
        stem = name.removesuffix("gate_up_proj")
        state[f"{stem}gate_proj"], state[f"{stem}up_proj"] = (each.clone() for each in state.pop(name).chunk(2, dim=1))
    decoder.load_state_dict(state)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each document by itself, causal."""
    document = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    mask = (document[:, None] == document[None]) & torch.ones(len(document), len(document)).tril().bool()
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)


def packed() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    return ids, torch.cat([torch.arange(length) for length in LENGTHS])


def logits(decoder: Decoder, routing: Routing, attention: Attend = attend) -> Tensor:
    assert decoder.lm_head is not None
    ids, positions = packed()
    out: Tensor = decoder.lm_head(decoder(ids, positions, attention, routing))
    return out


@pytest.fixture
def decoder() -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(config())
    for p in decoder.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return decoder


def routers(decoder: Decoder) -> list[Router]:
    return [module for module in decoder.modules() if isinstance(module, Router)]


@pytest.mark.parametrize("norm_topk", [True, False])
def test_logits_and_gradients_are_transformers(norm_topk: bool) -> None:
    model = transformers_model(norm_topk)
    decoder = Decoder(config(norm_topk=norm_topk))
    load(decoder, model)
    ours = logits(decoder, Routing())
    theirs = torch.cat([model(input_ids=ids[None]).logits[0] for ids in packed()[0].split(LENGTHS)])
    assert (ours - theirs).abs().max() <= 1e-5
    toward = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2))
    (ours * toward).sum().backward()
    (theirs * toward).sum().backward()
    gradients = ours_in_their_names({name: p.grad for name, p in decoder.named_parameters() if p.grad is not None})
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_experts_without_tokens_and_expanded_gradients() -> None:
    torch.manual_seed(0)
    experts = Experts(config())
    for p in experts.parameters():
        torch.nn.init.normal_(p)
    counts = torch.tensor([0, 3, 0, 0, 2, 0, 1, 0])
    for tokens in (counts, torch.zeros_like(counts)):
        x = torch.randn(int(tokens.sum()), 32, requires_grad=True)
        out = experts(x, tokens)
        out.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape
        for expert, rows in enumerate(x.split(tokens.tolist())):
            gate, up, down = (p[expert] for p in (experts.gate_proj, experts.up_proj, experts.down_proj))
            expected = (torch.nn.functional.silu(rows @ gate.T) * (rows @ up.T)) @ down.T
            assert torch.allclose(out.split(tokens.tolist())[expert], expected, rtol=1e-5, atol=1e-5)


def test_forced_choices_are_those_of_a_router_that_chose_them(decoder: Decoder) -> None:
    record: dict[int, Tensor] = {}
    first = logits(decoder, Routing(record=record))
    first.square().mean().backward()
    gradients = {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}
    assert sorted(record) == [0, 2]
    assert record[0].shape == (sum(LENGTHS), CHOSEN)
    decoder.zero_grad()
    for router in routers(decoder):  # by itself it would choose others now
        router.add_bias()
        assert router.e_score_correction_bias is not None
        router.e_score_correction_bias += torch.arange(EXPERTS) * 1.0
    assert not torch.equal(logits(decoder, Routing()), first)
    again = logits(decoder, Routing(replay=record))
    assert torch.equal(again, first)
    again.square().mean().backward()
    for name, p in decoder.named_parameters():
        assert p.grad is not None
        assert torch.equal(p.grad, gradients[name]), name


def test_other_choices_get_the_weights_that_the_router_gives_them() -> None:
    torch.manual_seed(0)
    mlp = SparseMlp(config(), layer=4)
    for p in mlp.parameters():
        torch.nn.init.normal_(p, std=0.3)
    x = torch.randn(6, 32)
    forced = torch.tensor([[7, 0]] * 6)
    probabilities = (x @ mlp.gate.weight.T).softmax(-1)[:, [7, 0]]
    weights = probabilities / probabilities.sum(-1, keepdim=True)
    expected = torch.zeros_like(x)
    for slot, expert in enumerate((7, 0)):
        gate, up, down = (p[expert] for p in (mlp.experts.gate_proj, mlp.experts.up_proj, mlp.experts.down_proj))
        expected += weights[:, slot, None] * ((torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T)
    assert torch.allclose(mlp(x, Routing(replay={4: forced})), expected, rtol=1e-5, atol=1e-6)


def test_a_bias_moves_the_choice_and_no_weight() -> None:
    torch.manual_seed(0)
    router = Router(config(norm_topk=False), layer=0)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(50, 32)
    router.add_bias()
    assert router.e_score_correction_bias is not None
    router.e_score_correction_bias[5] = 10.0
    weights, experts = router(x, Routing())
    assert (experts == 5).any(dim=1).all()
    assert torch.equal(weights, (x @ router.weight.T).softmax(-1).gather(1, experts))
    assert "e_score_correction_bias" in router.state_dict()


def test_the_load_is_counted_once_for_what_is_trained(decoder: Decoder) -> None:
    from torch.utils.checkpoint import checkpoint

    weight = torch.arange(sum(LENGTHS)).float()
    record: dict[int, Tensor] = {}
    with torch.no_grad():
        logits(decoder, Routing(weight=weight, record=record))
    assert all(router.load.counts == 0.0 for router in routers(decoder))
    for block in decoder.blocks():
        plain = block.forward
        block.forward = lambda *inputs, plain=plain: checkpoint(plain, *inputs, use_reentrant=False)  # type: ignore[method-assign]
    logits(decoder, Routing(weight=weight)).sum().backward()
    for router in routers(decoder):
        expected = torch.zeros(EXPERTS).index_add(0, record[router.layer].flatten(), weight.repeat_interleave(CHOSEN))
        assert torch.equal(router.load.counts, expected.double())
        assert isinstance(router.load.mass, Tensor)
        assert torch.isclose(router.load.mass.sum(), weight.double().sum(), rtol=1e-6)


def test_the_pull_is_the_gradient_of_the_balance_loss() -> None:
    torch.manual_seed(0)
    router = Router(config(), layer=0)
    torch.nn.init.normal_(router.weight)
    x, weight, pull = torch.randn(9, 32), torch.rand(9), torch.randn(EXPERTS)
    router.load.reset(pull)
    weights, _ = router(x, Routing(weight=weight))
    (weights * 0).sum().backward()
    ours = router.weight.grad
    assert ours is not None
    theirs = router.weight.detach().clone().requires_grad_()
    (weight[:, None] * (x @ theirs.T).softmax(-1) * pull).sum().backward()
    assert theirs.grad is not None
    assert torch.allclose(ours, theirs.grad, rtol=1e-5, atol=1e-6)
