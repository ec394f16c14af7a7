"""The arms of the sweeps, and what is observed of a run."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import arms
import pytest
import stability
import torch
from observations import Observations
from sweep import Size

from hf_qknorm import QKClip, logit_statistics


def run(text: str, arm: str, rate: float = 0.05) -> dict[str, Any]:
    settings = {"arm": arm, "rate": rate, "seed": 0, **asdict(stability.SIZES["quick"])}
    return stability.run_one(settings, text, "cpu")


@pytest.mark.parametrize(("arm", "same"), [("QuacK", False), ("QuacK, τ = 0.1", False), ("QK-clip", True)])
def test_the_arms_differ_from_the_baseline_where_they_should(arm, same, text):
    assert (run(text, "baseline") == run(text, arm)) is same  # no logit of these passes 100


def test_the_arm_of_qk_clip_clips(text, monkeypatch):
    monkeypatch.setattr(arms, "QKClip", lambda model: QKClip(model, threshold=1e-3))
    logits = [run(text, arm)["seen"]["logit"][-1] for arm in ("QK-clip", "baseline")]
    assert logits[0] < 0.1 * logits[1]


def test_a_constant_factor_scales_steps_of_queries_and_keys_alone(text):
    size = stability.SIZES["quick"]
    steps = []
    for arm in ("baseline", "constant, α = 0.1"):
        torch.manual_seed(0)
        model = size.build(20, "none")
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer = arms.ALL_ARMS[arm].around(model, torch.optim.SGD(model.parameters(), lr=1.0))
        ids = torch.randint(20, (2, size.length))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        steps.append({name: p.detach() - before[name] for name, p in model.named_parameters()})
    for name, step in steps[0].items():
        factor = torch.ones(step.shape[-1])
        if "c_attn" in name:
            factor[: 2 * size.width] = 0.1
        torch.testing.assert_close(steps[1][name], step * factor, atol=1e-7, rtol=1e-4)


def test_weights_alone_scale_steps_by_the_other_sides_norm_as_published():
    size = stability.SIZES["quick"]
    model: Any = size.build(20, "none")
    weight = model.transformer.h[0].attn.c_attn.weight
    optimizer = arms.ALL_ARMS["QuacK, weights alone"].around(model, torch.optim.SGD([weight], lr=1.0))
    weight.grad = torch.zeros_like(weight)
    optimizer.step()  # notes the initial norms
    with torch.no_grad():
        weight[:, size.width : 2 * size.width] *= 4  # keys
        model.transformer.h[0].attn.c_attn.bias.fill_(9)
    before, weight.grad = weight.detach().clone(), torch.ones_like(weight)
    optimizer.step()
    steps = (before - weight.detach()).split(size.width, dim=1)
    for step, expected in zip(steps, (0.25, 1, 1), strict=True):
        torch.testing.assert_close(step, torch.full_like(step, expected))


def test_each_arm_between_the_norms_changes_its_part_alone():
    size = stability.SIZES["quick"]

    def state(arm: str) -> tuple[bool, bool, float, float]:
        model: Any = size.build(20, arms.QKV_ARMS[arm].scheme)
        arms.QKV_ARMS[arm].change(model)
        block = model.transformer.h[0]
        v_norm = block.attn._modules.get("v_norm")
        gain = float(v_norm.weight.mean()) if v_norm else 0.0
        return isinstance(block.ln_1, torch.nn.LayerNorm), v_norm is not None, round(gain, 3), block.attn.q_norm.eps

    assert {arm: state(arm) for arm in arms.QKV_ARMS} == {
        "qk_norm": (True, False, 0, 1e-6),
        "qk_norm, pre-norm without gain and bias": (True, False, 0, 1e-6),
        "qk_norm without pre-norm": (False, False, 0, 1e-6),
        "qkv_norm": (False, True, 1, 1e-6),
        "qkv_norm, eps 1e-12": (False, True, 1, 1e-12),
        "qkv_norm, small value gain": (False, True, 0.08, 1e-6),
        "qkv_norm with pre-norm": (True, True, 1, 1e-6),
        "qkv_norm with pre-norm, small value gain": (True, True, 0.08, 1e-6),
    }


def test_norms_after_the_output_projections_bound_them(text):
    size = stability.SIZES["quick"]
    model: Any = size.build(20, "qk_norm")
    arms.ARMS["QK_FC_norm"].change(model)
    block = model.transformer.h[0]
    for part in (block.attn, block.mlp):
        with torch.no_grad():
            part.c_proj[0].weight.mul_(1e3)
    out = block.mlp(torch.randn(2, 3, size.width))
    assert float(out.detach().pow(2).mean().sqrt()) == pytest.approx(1, abs=1e-3)
    assert math.isfinite(run(text, "QK_FC_norm")["held_out"])


@pytest.mark.parametrize("scheme", ["none", "qk_norm"])
def test_observations_are_those_of_the_whole_attention_matrix(scheme):
    torch.manual_seed(0)
    model: Any = Size(1, 2, 16, 16, 2, steps=1).build(20, scheme)
    ids = torch.randint(20, (3, 16))
    layer = model.transformer.h[0].attn
    with torch.no_grad():
        layer.c_attn.weight.normal_()
    seen = Observations(model, ids, every=1)

    def matrices() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        kept: list[torch.Tensor] = []
        hook = layer.c_attn.register_forward_hook(lambda module, given, out: kept.append(out))
        with torch.no_grad():
            model(input_ids=ids)
        hook.remove()
        q, k, _ = (x.unflatten(-1, (2, 8)) for x in kept[0].split(16, -1))
        if scheme == "qk_norm":
            q, k = layer.q_norm(q), layer.k_norm(k)
        return q.transpose(1, 2), k.transpose(1, 2), kept[0], torch.ones(16, 16, dtype=torch.bool).tril()

    seen(0)
    q, k, out, visible = (x.detach() for x in matrices())
    logits = q @ k.mT / 8**0.5
    found = {name: column[0] for name, column in seen.columns.items() if column}
    assert found["logit"] == pytest.approx(float(logits[..., visible].abs().max()), rel=1e-3)
    assert found["qkv"] == pytest.approx(float(out.pow(2).mean().sqrt()), rel=1e-3)
    with logit_statistics(model) as statistics, torch.no_grad():
        model(input_ids=ids)
    (layer_statistics,) = statistics.values()
    assert found["proj"] == pytest.approx(float(layer_statistics.rms_out), rel=1e-3)
    assert found["fc2"] == pytest.approx(float(layer_statistics.rms_mlp), rel=1e-3)
    shares = torch.softmax(logits.masked_fill(~visible, -math.inf), -1)
    entropy = torch.special.entr(shares).sum(-1).mean((0, 2)) / torch.arange(1, 17).log().mean()
    assert found["entropy"] == pytest.approx(float(entropy.mean()), rel=1e-3)
    assert found["lowest"] == pytest.approx(float(entropy.min()), rel=1e-3)
    with torch.no_grad():
        layer.c_attn.weight[:, :16].add_(0.01 * torch.randn(16, 16))  # a step of the queries alone
    new = (matrices()[0].detach() - q) @ k.mT / 8**0.5
    seen(1)
    assert seen.columns["query_step"] == [pytest.approx(float(new[..., visible].abs().mean()), rel=1e-3)]
    assert seen.columns["key_step"] == [0]
