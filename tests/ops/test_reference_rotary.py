"""The oracle's norm and rotation, against transformers' own."""

import pytest
import torch
from torch import Tensor
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as interleaved
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as halves

from hf_qknorm.ops.reference import head_norm, norm_rope, norm_rope_one
from hf_qknorm.ops.types import Heads, Norm, Rotary

BATCH, HEADS, LENGTH, HEAD_DIM = 2, 3, 7, 12


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("width", [4, HEAD_DIM])
@pytest.mark.parametrize("rotate", [halves, interleaved], ids=["half", "interleaved"])
@pytest.mark.parametrize("norm", ["none", "rms", "layer"])
def test_the_rotation_after_the_norm_is_that_of_transformers(norm, rotate, width):
    q, k, v = (draw(BATCH, heads, LENGTH, HEAD_DIM, seed=heads) for heads in (HEADS, 1, 2))
    gain = draw(HEAD_DIM) if norm != "none" else None
    angle = draw(BATCH, LENGTH, width // 2)
    normed = [
        x if norm == "none" else head_norm(x.transpose(1, 2), norm, gain).transpose(1, 2).contiguous() for x in (q, k)
    ]
    expected = rotate(*normed, *(torch.cat([x, x], -1) for x in (angle.cos(), angle.sin())))
    one, rotary = Norm(norm, gain), Rotary(angle.cos(), angle.sin(), rotate is interleaved)
    found = norm_rope(Heads(q, k, v, one, one, rotary))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    assert torch.equal(norm_rope_one(q, one, rotary), found[0])


def test_the_rotation_is_rounded_once():
    x, angle = draw(BATCH, HEADS, LENGTH, HEAD_DIM).bfloat16(), draw(BATCH, LENGTH, HEAD_DIM // 2)
    rotary = Rotary(angle.cos(), angle.sin(), False)
    assert torch.equal(norm_rope_one(x, Norm(), rotary), norm_rope_one(x.double(), Norm(), rotary).bfloat16())
    assert torch.equal(norm_rope_one(x, Norm(), None), x)
