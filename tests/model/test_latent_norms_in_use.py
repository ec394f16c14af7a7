"""Norms of latent attention in calibration, blends, statistics, clips and monitors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_qknorm import QKClip, Scheme, calibrate, patch_model
from hf_qknorm.measure.bounds import logit_bounds, norm_limits
from hf_qknorm.measure.logit_statistics import logit_statistics
from hf_qknorm.model.attention import head_norms, patched_layers
from qknorm_tests.tables import randomise, sharp_model

RMS = Scheme(q="rms", k="rms")


@torch.no_grad()
def test_the_worst_input_reaches_the_bound():
    """Both parts of queries and keys lie along their largest gains, at position 0, where RoPE turns nothing."""
    model = patch_model(sharp_model("youtu"), RMS).double()
    for layer in patched_layers(model).values():
        for norm, gain in zip(head_norms(layer).values(), (2.0, 3.0, 5.0, 7.0), strict=True):
            norm.weight.fill_(0.5)[0] = gain
        spiked(layer.q_b_proj, layer.qk_head_dim, layer.qk_nope_head_dim)
        spiked(layer.kv_b_proj, layer.qk_nope_head_dim + layer.v_head_dim)
        spiked(layer.kv_a_proj_with_mqa, layer.kv_lora_rank + layer.qk_rope_head_dim, layer.kv_lora_rank)
    assert [list(head_norms(layer)) for layer in patched_layers(model).values()][0][:2] == ["q_norm", "k_norm"]
    with logit_statistics(model) as seen:
        model(input_ids=torch.full((1, 1), 5))
    for name, bound in logit_bounds(model).items():
        assert bound == pytest.approx((2 * 3 * 16 + 5 * 7 * 8) * 24**-0.5)
        assert float(seen[name].max_logit.max()) == pytest.approx(bound, rel=1e-5)
    assert [(x["gain_q"], x["gain_k"]) for x in norm_limits(model).values()] == [(5.0, 7.0)] * len(seen)


def spiked(projection: torch.nn.Module, stride: int, *places: int) -> None:
    """Make a projection return a large number at each `stride`-th output, and at `places` after it; 0 elsewhere."""

    def replace(_: Any, __: Any, out: Tensor) -> Tensor:
        spike = torch.zeros(stride, dtype=out.dtype)
        spike[[0, *places]] = 1e3
        return spike.repeat(out.shape[-1] // stride).expand_as(out)

    projection.register_forward_hook(replace)


def tokens(seed: int) -> Tensor:
    return torch.randint(3, 64, (2, 48), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scheme", [RMS, Scheme(q="rms", k="rms", scale=1.0)], ids=["own scale", "another scale"])
def test_calibration_keeps_the_predictions(scheme):
    model = patch_model(sharp_model("deepseek_v3"), scheme)
    report = calibrate(model, [tokens(seed) for seed in range(12)], knee=4.0)
    assert report.chosen.kl < 0.15 * report.ones.kl
    assert all(layer.after.bound is not None for layer in report.layers.values())


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [(RMS, "norms both its queries and its keys"), (Scheme(q="rms"), "share the key that rotates")],
)
def test_clipping_is_refused_where_it_does_nothing(scheme, reason):
    with pytest.raises(ValueError, match=reason):
        QKClip(patch_model(sharp_model("deepseek_v3"), scheme))


def test_clipping_with_normed_keys_scales_the_queries():
    model = randomise(patch_model(sharp_model("deepseek_v3"), Scheme(k="rms")))
    before = watched(model)
    clip = QKClip(model, threshold=0.1)
    model(input_ids=tokens(0))
    name, factors = next(iter(clip.step().items()))  # a later layer gets other inputs, too
    clip.remove()
    assert (factors < 1).any()
    torch.testing.assert_close(watched(model)[name], before[name] * factors)


@torch.no_grad()
def watched(model: PreTrainedModel) -> dict[str, Tensor]:
    """The largest |logit| of each head."""
    with logit_statistics(model) as seen:
        model(input_ids=tokens(0))
    return {name: layer.max_logit for name, layer in seen.items()}
