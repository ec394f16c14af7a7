"""A bias of the logits by position: attention functions add it after the cap, or refuse it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_qknorm import Scheme, patch_model
from hf_qknorm.attend.functions import REGISTERED
from hf_qknorm.model.attention import QKNormAttention, patched_layers
from qknorm_tests.covering import covering
from qknorm_tests.tables import assert_near, sharp_model


def capped_layer() -> QKNormAttention:
    return next(iter(patched_layers(patch_model(sharp_model("llama"), Scheme(softcap=2.0))).values()))


BIAS_SHAPES = [(2, 4, 1, 9), (1, 1, 9, 9)]
BIASED_MASKS = ("causal", "window", "both sides", "boolean", "additive", "ranges")


@pytest.mark.parametrize(
    ("mask", "name", "shape"), covering(BIASED_MASKS, ["hf_qknorm", "hf_qknorm_eager"], BIAS_SHAPES), ids=str
)
def test_a_position_bias_is_added_to_the_capped_logits(name, mask, shape):
    """In every form of mask, over the keys that it shows; a key that it hides stays hidden."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, 16, generator=generator) for n in (9, 9, 9))
    bias = 3 * torch.randn(shape, generator=generator)
    back = torch.arange(9)[:, None] - torch.arange(9)
    seen = {"window": (back >= 0) & (back < 3), "both sides": back > -9}.get(mask, back >= 0).expand(2, 1, 9, 9).clone()
    options: dict[str, Any] = {"is_causal": mask != "both sides", "sliding_window": 3 if mask == "window" else None}
    given = None
    if mask in ("boolean", "additive", "ranges"):
        seen[0, ..., :2] = False
        given = seen if mask == "boolean" else torch.zeros(()).where(seen, torch.finfo(q.dtype).min)
    if mask == "ranges":
        start, count = seen.int().argmax(-1), seen.sum(-1)
        given = torch.stack([start, start + count], -1).to(torch.int32)
    module = capped_layer()
    out, _ = REGISTERED[name](module, q, k, v, given, scaling=1.0, softcap=2.0, position_bias=bias, **options)
    logits = 2 * torch.tanh(q @ k.transpose(-1, -2) / 2) + bias
    expected = logits.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num() @ v
    assert_near(out, expected.transpose(1, 2), 1e-5)


def test_the_kernels_refuse_a_position_bias():
    q, k, v = (torch.randn(1, 2, 3, 16) for _ in range(3))
    module = capped_layer()
    with pytest.raises(ValueError, match="position bias"):
        REGISTERED["hf_qknorm_triton"](module, q, k, v, None, position_bias=torch.zeros(1, 2, 3, 3))
