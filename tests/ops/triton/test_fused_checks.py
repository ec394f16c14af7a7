"""The heads that the Triton kernels take, and the modes of torch that their operators refuse."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from hf_qknorm.ops import fused_checks, library
from hf_qknorm.ops.triton.architectures import ARCHITECTURES
from hf_qknorm.ops.types import Heads, Norm, Rotary
from qknorm_tests.operator_calls import call

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
B, H, HK, T, S, D = 2, 4, 2, 3, 8, 16
RMS = Norm("rms")


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def heads(length: int = T, keys: int | None = None) -> list[Tensor]:
    """q, k and v."""
    keys = keys or length
    return [normal(B, n, x, D, seed=i) for i, (n, x) in enumerate(((H, length), (HK, keys), (HK, keys)))]


@pytest.mark.parametrize("capability", [(7, 5), (8, 9), (9, 0), (11, 0), (13, 0)])
def test_gpus_without_tiles_are_refused(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_checks, "_capability", lambda device: capability)
    reason = fused_checks._why_not_here("cuda:1")
    if capability in ARCHITECTURES:
        assert reason is None
    else:
        assert capability in ((7, 5), (11, 0), (13, 0))
        assert "for compute capability 8.0, 8.6, " in (reason or "")
        assert reason.endswith(f", and cuda:1 has {capability[0]}.{capability[1]}")


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, device=DEVICE)


# The heads, and the reason against them in attention and in norm and RoPE alone, None for none.
RAW = "q [2, 4, 3, 16] and k [2, 2, 8, 16] must be of one length to be normed or rotated"
HEADS: list[tuple[Heads, str | None, str | None]] = [
    (Heads(*heads(), RMS, RMS), None, None),
    (Heads(*heads(T, S)), None, None),
    (Heads(*heads(T, S), RMS), RAW, RAW),
    (Heads(*(x.double() for x in heads())), *["the kernels compute in torch.float32, torch.bfloat16, .*float64"] * 2),
    (Heads(*[normal(1, 2, T, 264)] * 3), *["head_dim is 264, and the kernels' registers hold 256 at most"] * 2),
    (Heads(*heads()[:2], normal(B, HK, T, 264)), "head_dim is 264, .*", None),
    (Heads(*[normal(1, 2, T, 18)] * 3), "head_dim is 18: .* multiples of 16 bytes, that is of 4 numbers", None),
    (Heads(*[normal(1, 2, T, 20, dtype=torch.bfloat16)] * 3), "head_dim is 20: .* that is of 8 numbers", None),
    (Heads(*heads(0, S)), *["there is nothing to attend: q [2, 4, 0, 16].*"] * 2),
    (Heads(*heads(), RMS, Norm("rms", ones(H, D))), *["k_norm.gain must be .* [1], [16] or [2, 16], got [4, 16]"] * 2),
    (Heads(*heads(), Norm("layer", None, ones(D - 1))), *["q_norm.bias must be [1], [D] or [H, D], .*"] * 2),
    (Heads(*heads(), Norm("rms", knee=ones(6)[::2])), *["q_norm.knee must be [3] and contiguous, got [3]"] * 2),
    (Heads(*heads(), rotary=Rotary(ones(1, T, 9), ones(1, T, 9))), *["a rotation of 18 columns does not fit .*"] * 2),
    (Heads(*heads(), rotary=Rotary(ones(3, T, 8), ones(3, T, 8))), *["cos and sin must be .* B = 2 and T = 3, .*"] * 2),
    (Heads(*heads(), rotary=Rotary(ones(1, S, 8), ones(1, S, 8))), *["cos and sin must be .*, got [1, 8, 8].*"] * 2),
    (Heads(*heads(), rotary=Rotary(ones(1, T, 8), ones(1, T, 4))), *["cos and sin must be .*, got .* [1, 3, 4]"] * 2),
]


@pytest.mark.parametrize(("given", "attention", "norms"), HEADS, ids=[f"{x[1]}-{i}" for i, x in enumerate(HEADS)])
def test_the_heads_that_the_kernels_take(given: Heads, attention: str | None, norms: str | None) -> None:
    for found, expected in ((library.why_not_fused(given), attention), (library.why_not_norm_rope(given), norms)):
        if expected is None:
            assert found is None
        else:
            assert re.fullmatch(".*".join(map(re.escape, expected.split(".*"))), found or "none")


def test_sinks_and_ranges_with_gaps_are_read_as_they_are() -> None:
    q, k, v = heads()
    sinks, ranges = normal(H), torch.tensor([[0, 2], [0, 3], [1, 3]], dtype=torch.int32, device=DEVICE)[None]
    expected = library.fused_attention(*call(q, k, v, sinks=sinks, ranges=ranges))
    gaps, columns = torch.full((H, 3), torch.nan, device=DEVICE), ranges.mT.contiguous().mT
    gaps[:, 1] = sinks
    assert torch.equal(library.fused_attention(*call(q, k, v, sinks=gaps[:, 1], ranges=columns)), expected)


def test_forward_mode_is_refused() -> None:
    """Otherwise torch would take the result's tangent as zero."""
    q, k, v = heads()

    def attend(q: Tensor) -> Tensor:
        return library.fused_attention(*call(q, k, v, q_norm=RMS))

    with pytest.raises(NotImplementedError, match=r"no forward-mode derivative.*hf_qknorm_eager"):
        torch.func.jvp(attend, (q,), (q,))
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda x: library.norm_rope(Heads(q, x, v, RMS, RMS))[1], (k,), (k,))
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda x: library.norm_rope_one(k, Norm("rms", x), None), (normal(D),), (normal(D),))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        library.fused_attention(*call(q, k, v, sinks=forward_ad.make_dual(normal(H), normal(H))))
