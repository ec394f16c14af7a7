"""The fused operators refuse arguments that would make kernels read or write out of bounds, however they are called."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from hf_qknorm.ops import fused_checks, library, operators
from hf_qknorm.ops.registration import pack, pack_norms, unpack
from hf_qknorm.ops.triton.architectures import ARCHITECTURES
from hf_qknorm.ops.types import Heads, Norm, Options, Rotary, Visible
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


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (11, 0), (12, 0), (13, 0)])
def test_gpus_without_tiles_are_refused(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_checks, "_capability", lambda device: capability)
    reason = fused_checks._why_not_here("cuda:1")
    if capability in ARCHITECTURES:
        assert reason is None
    else:
        assert capability in ((7, 5), (11, 0), (13, 0))
        assert "for compute capability 8.0, 8.6, " in (reason or "")
        assert reason.endswith(f", and cuda:1 has {capability[0]}.{capability[1]}")


def assert_refused(error: type[Exception], message: str, function: Any, *arguments: Any) -> None:
    pattern = ".*".join(re.escape(piece) for piece in message.split(".*"))
    with pytest.raises(error, match=pattern):
        function(*arguments)


ATTENTION: list[tuple[dict[str, Any], str]] = [
    ({"heads": [x.double() for x in heads()]}, "got torch.float64. Use library.attention"),
    ({"heads": [normal(1, 2, T, 264)] * 3}, "head_dim is 264, and the kernels' registers hold 256 at most"),
    ({"heads": [normal(1, 2, T, 18)] * 3}, "rows of torch.float32 must be multiples of 16 bytes, that is of 4 numbers"),
    ({"heads": [normal(1, 2, T, 20, dtype=torch.bfloat16)] * 3}, "head_dim is 20: .* that is of 8 numbers"),
    ({"heads": heads(0, S)}, "there is nothing to attend"),
    ({"q_norm": Norm("rsm")}, "q_norm.kind must be one of none, rms, layer, l2, lp, got 'rsm'"),
    ({"rotary": Rotary(*[torch.ones(1, T, 9)] * 2)}, "a rotation of 18 columns does not fit"),
    ({"ranges": torch.zeros(B, T + 1, 2, dtype=torch.int32)}, "ranges must be"),
    ({"ranges": torch.zeros(3, T, 2, dtype=torch.int32)}, "[B or 1, T, 2] with B = 2"),
    ({"ranges": torch.zeros(B, T, 2, dtype=torch.int64)}, "ranges must be int32, got torch.int64"),
    ({"sinks": torch.zeros(H - 1)}, "sinks must be one logit a query head, [4], got [3]"),
    ({"sinks": torch.zeros(H, dtype=torch.int64)}, "sinks must be of floating point numbers, got torch.int64"),
    ({"sinks": torch.zeros(H, device="meta")}, "sinks must be on the device of q"),
    ({"dropout": 0.1}, "dropout needs a seed, [1] in torch.int64, got None"),
    ({"dropout": 0.1, "seed": torch.zeros(1)}, "got [1] in torch.float32"),
    ({"mask": torch.ones(B, 1, T, T, dtype=torch.bool)}, "takes ranges of keys and no mask: use library.attention"),
    ({"scale": -1.0}, "scale must be positive, got -1.0"),
    ({"softcap": 0.0}, "softcap must be finite and greater than 0, got 0.0"),
    ({"q_norm": RMS, "heads": heads(T, S)}, "q [2, 4, 3, 16] and k [2, 2, 8, 16] must be of one length"),
    ({"q_norm": Norm("rms", eps=-1.0)}, "q_norm.eps must not be negative, got -1.0"),
    ({"k_norm": Norm("lp", p=0.5)}, "k_norm.p must be at least 1, got 0.5"),
    ({"q_norm": Norm("rms", torch.ones(D, dtype=torch.int32))}, "q_norm.gain must be of floating point numbers"),
    ({"k_norm": Norm("rms", torch.ones(D, device="meta"))}, "k_norm.gain must be on the device of q"),
    ({"k_norm": Norm("layer", None, torch.ones(H, D))}, "k_norm.bias must be [1], [D] or [H, D], here .*, got [4, 16]"),
    ({"q_norm": Norm("rms", knee=torch.ones(2))}, "q_norm.knee must be [3] and contiguous, got [2]"),
    ({"q_norm": Norm("rms", knee=torch.ones(6)[::2])}, "q_norm.knee must be [3] and contiguous, got [3]"),
    ({"k_norm": Norm("lp", knee=torch.ones(3, dtype=torch.int32))}, "k_norm.knee must be of floating point numbers"),
    ({"k_norm": Norm("rms", knee=torch.ones(3, device="meta"))}, "k_norm.knee must be on the device of q"),
    ({"rotary": Rotary(*[torch.ones(3, T, 8)] * 2)}, "[B or 1, T, R/2] with B = 2 and T = 3, got [3, 3, 8]"),
    ({"rotary": Rotary(torch.ones(1, T, 8), torch.ones(1, T, 4))}, "got [1, 3, 8] and [1, 3, 4]"),
    ({"rotary": Rotary(*[torch.ones(1, T, 8, dtype=torch.int32)] * 2)}, "cos must be of floating point numbers"),
    ({"rotary": Rotary(*[torch.ones(1, T, 8, device="meta")] * 2)}, "cos must be on the device of q"),
]


@pytest.mark.parametrize(("wrong", "message"), ATTENTION, ids=[message for _, message in ATTENTION])
def test_attention(wrong: dict[str, Any], message: str) -> None:
    given = {"q_norm": Norm(), "k_norm": Norm(), "rotary": None, "scale": 0.25, "heads": heads(), **wrong}
    values = pack(
        Heads(*given["heads"], given["q_norm"], given["k_norm"], given["rotary"]),
        Visible(*(given.get(name) for name in Visible._fields)),
        Options(given["scale"], given.get("softcap"), dropout=given.get("dropout", 0.0)),
    )
    values = [x.to(DEVICE) if isinstance(x, Tensor) and not x.is_meta else x for x in values]
    assert_refused(ValueError, message, fused_checks.check_attention, *unpack(tuple(values)))
    if not any(isinstance(x, Tensor) and x.is_meta for x in values):  # torch gives these to the fake
        assert_refused(ValueError, message, operators.FUSED_ATTENTION, *values, False)


@pytest.mark.parametrize(
    ("grad", "out", "normaliser", "message"),
    [
        ((B, H, T - 1, D), (B, H, T, D), (B, H, T, 2), "expected grad and out [2, 4, 3, 16]"),
        ((B, H, T, D), (B, HK, T, D), (B, H, T, 2), "got [2, 4, 3, 16], [2, 2, 3, 16]"),
        ((B, H, T, D), (B, H, T, D), (B, H, T), "normaliser [2, 4, 3, 2], got"),
    ],
)
def test_gradients(grad: tuple[int, ...], out: tuple[int, ...], normaliser: tuple[int, ...], message: str) -> None:
    shapes = {"grad": grad, "out": out, "normaliser": normaliser}
    results = {name: torch.ones(shape, device=DEVICE) for name, shape in shapes.items()}
    values = *pack(Heads(*heads()), Visible(), Options(0.25)), False
    assert_refused(ValueError, message, operators.FUSED_ATTENTION_BACKWARD, *results.values(), *values)


def test_sinks_and_ranges_with_gaps_are_read_as_they_are() -> None:
    q, k, v = heads()
    sinks, ranges = normal(H), torch.tensor([[0, 2], [0, 3], [1, 3]], dtype=torch.int32, device=DEVICE)[None]
    expected = library.fused_attention(*call(q, k, v, sinks=sinks, ranges=ranges))
    gaps, columns = torch.full((H, 3), torch.nan, device=DEVICE), ranges.mT.contiguous().mT
    gaps[:, 1] = sinks
    assert torch.equal(library.fused_attention(*call(q, k, v, sinks=gaps[:, 1], ranges=columns)), expected)


def test_norm_rope() -> None:
    q, k, _ = heads()
    message = "q [2, 4, 3, 16] and k [2, 2, 2, 16] must be of one length"
    for norm in (RMS, Norm()):
        packed = pack_norms(norm, norm, None)
        assert_refused(ValueError, message, operators.NORM_ROPE_HEADS, q, k[:, :, :2], *packed)
    message = "dq must be [2, 4, 3, 16], got [2, 4, 2, 16]"
    assert_refused(ValueError, message, operators.NORM_ROPE_BACKWARD, q[:, :, :2], k, q, k, *packed)


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
