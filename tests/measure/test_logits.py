"""Measuring one call: kernels and blocks agree with the reference for every kind of mask."""

from typing import Any

import pytest
import torch

from hf_qknorm import patch_model
from hf_qknorm.measure.logits import call_to_measure, measure, measure_by_kernels
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.ops import reference
from hf_qknorm.ops.types import Call, Heads, Visible
from qknorm_tests.operator_calls import call as operator_call
from qknorm_tests.random_qkv import make_qkv
from qknorm_tests.tables import assert_near
from qknorm_tests.tiny import tiny_model

CALLS = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": 5},
    "ranges": {"ranges": torch.tensor([[[0, i + 1] for i in range(17)], [[4, max(i, 3) + 1] for i in range(17)]])},
}


def call(name: str) -> tuple[Call, Any]:
    """A call with 2 rows, 4 query heads, 2 key heads, 17 queries; and the reference."""
    q, k, _ = (x.detach() for x in make_qkv(2, 4, 2, 17, 17, 16, spread=2.0))
    rules = {name: x.to(torch.int32) if isinstance(x, torch.Tensor) else x for name, x in CALLS[name].items()}
    made = Call(*operator_call(q, k, k, scale=0.25, **rules))
    return made, reference.attend(*made)


@pytest.mark.parametrize("name", CALLS)
def test_blocks_and_kernels_agree_with_the_oracle(name):
    made, exact = call(name)
    found, even = measure(made, cap=1.0)
    kernels = measure_by_kernels(made, cap=50.0)
    for statistics in (found, kernels):
        assert_near(statistics.max_logit, exact.max_logit, 1e-5)
        assert_near(statistics.entropy, exact.entropy, 1e-5)
    assert torch.equal(found.seen, kernels.seen)
    assert (found.over_cap > 0).all()
    assert not kernels.over_half.any()
    keys = (exact.weights > 0).sum(-1)[:, 0]
    assert_near(even, keys.clamp_min(1).double().log().sum() / (keys > 0).sum(), 1e-5)


@pytest.mark.parametrize("pad", ["left", "right"])
@pytest.mark.parametrize("window", [None, 5])
def test_padding_masks_of_flash_attention(pad, window):
    (layer, *_) = patched_layers(patch_model(tiny_model("llama"), "none")).values()
    q, k, _ = (x.detach() for x in make_qkv(2, 4, 2, 12, 12, 16))
    real = torch.ones(2, 12, dtype=torch.long)
    real[0, slice(0, 4) if pad == "left" else slice(-4, None)] = 0
    made = call_to_measure(layer, q, k, real, {"sliding_window": window}, real.bool())
    dense = real[:, None, None, :].bool() & real[:, None, :, None].bool()
    exact = reference.attention(q, k, k, causal=True, window=window, mask=dense)
    found, _ = measure(made, cap=50.0)
    assert_near(found.max_logit, exact.max_logit, 1e-5)
    assert_near(found.entropy, exact.entropy, 1e-5)


def test_block_masks_are_refused():
    (layer, *_) = patched_layers(patch_model(tiny_model("llama"), "none")).values()
    q, k, _ = make_qkv(1, 4, 2, 12, 12, 16)
    with pytest.raises(ValueError, match='the mask of .* is a object.*set_attn_implementation\\("hf_qknorm"\\)'):
        call_to_measure(layer, q, k, object(), {"sliding_window": None}, None)


def test_heads_that_are_not_finite_have_no_largest_logit():
    made, exact = call("causal")
    q, k, v, *_ = made.heads
    q, k = q.clone(), k.clone()
    q[1, 0, 5, 3], k[0, 1, 2, 2] = float("nan"), float("inf")
    found, _ = measure(made._replace(heads=Heads(q, k, v)), cap=50.0)
    assert found.max_logit.isnan().tolist() == [True, False, True, True]
    assert_near(found.max_logit[1], exact.max_logit[1], 1e-5)


def test_kernels_do_not_measure_large_logits():
    made, exact = call("causal")
    largest = float(exact.max_logit.max())
    assert measure_by_kernels(made, cap=2.1 * largest) is not None
    assert measure_by_kernels(made, cap=1.9 * largest) is None
    assert measure_by_kernels(made._replace(visible=Visible(mask=torch.ones(1, 1, 17, 17).bool())), cap=50.0) is None
