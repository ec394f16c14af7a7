"""Arguments that do not fit: each is refused, or a reason not to take them, before any number is computed."""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_qknorm.ops import fused_checks, library
from hf_qknorm.ops.checks import check_call
from hf_qknorm.ops.cpu import attention as cpu
from hf_qknorm.ops.cpu import build
from hf_qknorm.ops.cpu.norm_rope import FIELDS
from hf_qknorm.ops.triton.architectures import ARCHITECTURES
from hf_qknorm.ops.types import Call, Heads, Norm, Rotary
from qknorm_tests.norm_cases import DEVICE
from qknorm_tests.operator_calls import call
from qknorm_tests.random_qkv import make_qkv

RMS = Norm("rms")


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


GOOD = {"q": zeros(2, 4, 5, 8), "k": zeros(2, 2, 7, 8), "v": zeros(2, 2, 7, 8)}
WRONG = [
    ({"q": zeros(4, 5, 8)}, r"expected q \[B, H, T, D\].*got \[4, 5, 8\]"),
    ({"k": zeros(2, 7, 8), "v": zeros(2, 7, 8)}, r"expected q .*\[2, 7, 8\]"),
    ({"v": zeros(2, 2, 6, 8)}, r"expected q .*\[2, 2, 6, 8\]"),
    ({"v": zeros(2, 2, 7, 4)}, r"expected q .*\[2, 2, 7, 4\]"),
    ({"q": zeros(1, 4, 5, 8)}, r"q \[1, 4, 5, 8\] and k \[2, 2, 7, 8\] do not fit"),
    ({"q": zeros(2, 4, 5, 16)}, r"q \[2, 4, 5, 16\] and k .* do not fit: batch and head_dim must be equal"),
    ({"q": zeros(2, 3, 5, 8)}, r"q \[2, 3, 5, 8\] and k .* a multiple of the key heads"),
    ({"q": zeros(2, 4, 5, 8, dtype=torch.bfloat16)}, r"share a dtype, got torch.bfloat16, torch.float32"),
    ({"v": zeros(2, 2, 7, 8, dtype=torch.float16)}, r"share a dtype, .*torch.float16: cast q and k to v's"),
    ({"mask": zeros(5, 7)}, r"the mask must broadcast to \[B, H, T, S\] = \[2, 4, 5, 7\], got \[5, 7\]"),
    ({"mask": zeros(2, 1, 5, 6)}, r"the mask must broadcast .* got \[2, 1, 5, 6\]"),
    ({"mask": zeros(2, 2, 5, 7)}, r"the mask must broadcast .* got \[2, 2, 5, 7\]"),
    ({"ranges": zeros(2, 1, 5, 2)}, r"ranges must be .* \[B or 1, T, 2\] with B = 2 and T = 5, got \[2, 1, 5, 2\]"),
    ({"ranges": zeros(3, 5, 2)}, r"ranges must be .* got \[3, 5, 2\]"),
    ({"ranges": zeros(2, 7, 2)}, r"ranges must be .* got \[2, 7, 2\]"),
    ({"ranges": zeros(2, 5, 2, dtype=torch.int64)}, r"ranges must be int32, got torch.int64"),
    ({"sinks": zeros(2)}, r"sinks must be one logit a query head, \[4\], got \[2\]"),
    ({"sinks": zeros(1, 4)}, r"sinks must be .* got \[1, 4\]"),
    *(({"dropout": x}, rf"dropout must be in \[0, 1\), got {x}") for x in (-0.1, 1.0, math.nan)),
    ({"q": zeros(2, 0, 5, 8)}, r"at least one head and one column, got q \[2, 0, 5, 8\]"),
    ({"k": zeros(2, 0, 7, 8), "v": zeros(2, 0, 7, 8)}, r"at least one head and one column, .* k \[2, 0, 7, 8\]"),
    ({x: zeros(2, 2, 5, 0) for x in "qkv"}, r"at least one head and one column, got q \[2, 2, 5, 0\]"),
    ({"mask": zeros(1, 1, 5, 7, dtype=torch.int64)}, r"the mask must be boolean .* got torch.int64"),
    *(({"scale": x}, rf"scale must be finite and greater than 0, got {x}") for x in (math.nan, math.inf, -1.0)),
    *(
        ({"softcap": x}, rf"softcap must be finite and greater than 0, got {x}")
        for x in (0.0, -5.0, math.inf, math.nan)
    ),
    ({"window": 0, "causal": True}, r"window must be at least 1 with causal .* got 0: pass None"),
    ({"window": -1}, r"window must be at least 0 .* got -1: pass None"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=[message for _, message in WRONG])
def test_calls_that_do_not_fit_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_call(*call(**GOOD | wrong))


def test_raw_heads_are_refused_without_their_kernels() -> None:
    heads, *others = call(**GOOD)
    with pytest.raises(ValueError, match="use fused_attention for raw ones"):
        library.attention(heads._replace(k_norm=RMS), *others)


def test_arguments_that_broadcast_are_accepted() -> None:
    ranges = zeros(1, 5, 2, dtype=torch.int32)
    given = call(**GOOD, mask=zeros(1, 1, 1, 7), ranges=ranges, sinks=zeros(4), dropout=0.5)
    check_call(*given)
    assert library.attention(*given).shape == (2, 4, 5, 8)


NOT_IN_CPP = [
    ({"mask": torch.ones(1, 1, 5, 5, dtype=torch.bool)}, r"the mask \[1, 1, 5, 5\] is an arbitrary one"),
    ({"dtype": torch.float64}, "kernels take float32, bfloat16, float16, and the heads are float64"),
    ({"head_dim": 257}, "a head_dim of up to 256, and it is 257"),
    ({"q_norm": RMS}, "heads after norm and rotation"),
]


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("wrong", "message"), NOT_IN_CPP, ids=[message for _, message in NOT_IN_CPP])
def test_calls_that_the_cpp_kernels_do_not_take(wrong: dict[str, Any], message: str) -> None:
    given = dict(wrong)
    heads = make_qkv(1, 2, 1, 5, 5, given.pop("head_dim", 8), dtype=given.pop("dtype", torch.float32))
    assert cpu.why_not(Call(*call(*make_qkv(1, 2, 1, 5, 5, 8)))) is None
    assert re.search(message, str(cpu.why_not(Call(*call(*heads, **given)))))


NORM_ROPE = [
    ({"q_kind": "lp"}, "q_kind must be none, rms, layer or l2, got lp"),
    ({"k_eps": -1.0}, "k_eps must not be negative"),
    ({"q_eps": float("nan")}, "q_eps must not be negative"),
    ({"k_knee": torch.ones(2)}, "k_knee must be"),
    ({"q_gain": torch.ones(3)}, "q_gain must be"),
    ({"k_bias": torch.ones(2, 16, 1)}, "k_bias must be"),
    ({"k": zeros(1, 1, 4, 16)}, "k must be"),
    ({"k": zeros(1, 1, 3, 16, dtype=torch.bfloat16)}, "k must be of Float"),
    ({"cos": torch.ones(1, 3, 4)}, "cos and sin must be given together"),
]


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("changed", "message"), NORM_ROPE, ids=[message for _, message in NORM_ROPE])
def test_the_cpp_norm_refuses_what_does_not_fit(changed: dict[str, object], message: str) -> None:
    norms = {f"{side}_{name}": value for side in "qk" for name, value in (("kind", "rms"), ("eps", 1e-6), ("p", 2.0))}
    heads = {"q": zeros(1, 2, 3, 16), "k": zeros(1, 1, 3, 16)}
    right = dict.fromkeys(FIELDS) | norms | heads | {"interleaved": False}
    build.overload("norm_rope")(*right.values())
    with pytest.raises(ValueError, match=message):
        build.overload("norm_rope")(*(right | changed).values())


B, H, HK, T, S, D = 2, 4, 2, 3, 8, 16


def heads(length: int = T, keys: int = T, columns: int = D, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k and v."""
    return [torch.ones(B, n, x, columns, device=DEVICE, dtype=dtype) for n, x in ((H, length), (HK, keys), (HK, keys))]


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, device=DEVICE)


# The heads, and the reason against them in attention and in norm and RoPE alone, None for none
RAW = "q [2, 4, 3, 16] and k [2, 2, 8, 16] must be of one length to be normed or rotated"
WIDE = "head_dim is 264, and the kernels' registers hold 256 at most"
FUSED: list[tuple[Heads, str | None, str | None]] = [
    (Heads(*heads(), RMS, RMS), None, None),
    (Heads(*heads(T, S)), None, None),
    (Heads(*heads(T, S), RMS), RAW, RAW),
    (Heads(*heads(dtype=torch.float64)), *["the kernels compute in torch.float32, torch.bfloat16, .*float64"] * 2),
    (Heads(*heads(columns=264)), WIDE, WIDE),
    (Heads(*heads()[:2], ones(B, HK, T, 264)), WIDE, None),
    (Heads(*heads(columns=18)), "head_dim is 18: .* multiples of 16 bytes, that is of 4 numbers", None),
    (Heads(*heads(columns=20, dtype=torch.bfloat16)), "head_dim is 20: .* that is of 8 numbers", None),
    (Heads(*heads(0, S)), *["there is nothing to attend: q [2, 4, 0, 16].*"] * 2),
    (Heads(*heads(), RMS, Norm("rms", ones(H, D))), *["k_norm.gain must be .* [1], [16] or [2, 16], got [4, 16]"] * 2),
    (Heads(*heads(), Norm("layer", None, ones(D - 1))), *["q_norm.bias must be [1], [D] or [H, D], .*"] * 2),
    (Heads(*heads(), Norm("rms", knee=ones(6)[::2])), *["q_norm.knee must be [3] and contiguous, got [3]"] * 2),
    *(
        (Heads(*heads(), rotary=Rotary(ones(*cos), ones(*sin))), reason, reason)
        for cos, sin, reason in (
            ((1, T, 9), (1, T, 9), "a rotation of 18 columns does not fit .*"),
            ((3, T, 8), (3, T, 8), "cos and sin must be .* B = 2 and T = 3, .*"),
            ((1, S, 8), (1, S, 8), "cos and sin must be .*, got [1, 8, 8].*"),
            ((1, T, 8), (1, T, 4), "cos and sin must be .*, got .* [1, 3, 4]"),
        )
    ),
]
needs_triton = pytest.mark.skipif(fused_checks._find_spec("triton") is None, reason="needs Triton")


@needs_triton
@pytest.mark.parametrize(("given", "attention", "norms"), FUSED, ids=[f"{x[1]}-{i}" for i, x in enumerate(FUSED)])
def test_the_heads_that_the_triton_kernels_take(given: Heads, attention: str | None, norms: str | None) -> None:
    for found, expected in ((library.why_not_fused(given), attention), (library.why_not_norm_rope(given), norms)):
        pattern = "none" if expected is None else ".*".join(map(re.escape, expected.split(".*")))
        assert re.fullmatch(pattern, found or "none")


@needs_triton
def test_gpus_without_tiles_and_other_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability in [(8, 9), (9, 0), (7, 5), (11, 0), (13, 0)]:
        monkeypatch.setattr(fused_checks, "_capability", lambda device, found=capability: found)
        reason = fused_checks._why_not_here("cuda:1")
        if capability in ARCHITECTURES:
            assert reason is None
        else:
            assert "for compute capability 8.0, 8.6, " in reason
            assert reason.endswith(f", and cuda:1 has {capability[0]}.{capability[1]}")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    on_cpu = Heads(*(x.cpu() for x in heads()))
    assert library.why_not_fused(on_cpu) == "the kernels are for NVIDIA GPUs, and the tensors are on cpu"
