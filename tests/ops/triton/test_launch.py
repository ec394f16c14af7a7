"""Arguments of the kernels: constants, layouts of the copy engine, addresses of 64 bits, and numbers of dropout."""

import pytest
import torch
import triton
import triton.language as tl

from hf_qknorm.ops.triton import launch, score_math
from hf_qknorm.ops.triton.architectures import ARCHITECTURES
from hf_qknorm.ops.triton.arguments import Constants, HeadArguments
from hf_qknorm.ops.triton.head_tiles import _addresses
from hf_qknorm.ops.triton.launch import as_tiles, dense, dropout_numbers
from hf_qknorm.ops.triton.norm_rope_kernel import _entries
from qknorm_tests.norm_cases import DEVICE, lay_out


@pytest.mark.parametrize("interpreted", [True, False])
def test_fields_of_constants_are_constants_for_the_compiler(interpreted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 refuses other fields as arguments of device functions; a call's are made once."""
    monkeypatch.setattr(launch, "INTERPRETED", interpreted)
    launch.constants.cache_clear()
    made = launch.constants(64, 32, 16, 16, TANH="exact")
    assert all(isinstance(field, triton.language.constexpr) != interpreted for field in made)
    assert [getattr(field, "value", field) for field in made] == list(Constants(64, 32, 16, 16, TANH="exact"))
    assert launch.constants(64, 32, 16, 16, TANH="exact") is made
    launch.constants.cache_clear()


def heads(head_dim: int = 40) -> torch.Tensor:
    return torch.randn(2, 3, 5, head_dim, device=DEVICE).bfloat16()


COPIED = {
    "sparse": lay_out(heads(), "sparse"),
    "short rows": heads(20),  # of 40 bytes
    "offset": heads(48)[..., 4:44],  # starts 8 bytes in
    "odd rows": heads(41)[..., :40],
    "expanded": heads()[:1, :1, :1].expand(2, 3, 5, 40),
    "one row": heads()[:, :, :1].expand(-1, -1, 5, -1),
}


def test_heads_that_are_not_aligned_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    for layout in ("heads", "tokens"):
        x = lay_out(heads(), layout)
        assert dense(x) is x
        assert dense(x[:, :2, 1:]).data_ptr() == x[:, :2, 1:].data_ptr()
    for what, x in COPIED.items():
        copied = dense(x)
        assert copied.is_contiguous(), what
        assert torch.equal(copied, x), what
    # The stride of an axis of one is never used, but aligned loads need a multiple of 16 bytes.
    x = torch.randn(5, 40, device=DEVICE).bfloat16().as_strided((1, 1, 5, 40), (3, 0, 40, 1))
    assert dense(x) is x
    monkeypatch.setattr(launch, "architecture", lambda device: ARCHITECTURES[9, 0])
    made = as_tiles(x, 4)
    assert (made.shape, made.strides, made.block_shape) == ([1, 1, 5, 40], [16, 16, 40, 1], [1, 1, 4, 64])
    monkeypatch.setattr(launch, "architecture", lambda device: ARCHITECTURES[8, 0])
    assert as_tiles(x, 4) == (x, 16, 16, 40)


@triton.jit
def _offsets(X, head, start, out, entries, C: tl.constexpr):
    i = tl.arange(0, C.BLOCK_M)
    at = i[:, None] * C.PADDED + i[None, :]
    found = _addresses(X, tl.program_id(0) + 3, head, start, C.BLOCK_M, C.PADDED).to(tl.int64) - X.data.to(tl.int64)
    tl.store(out + at, found)
    tl.store(entries + at, _entries(X, tl.program_id(0) + 3, tl.program_id(0) + head, i + start, i))


def test_addresses_have_64_bits() -> None:
    batch, head, row = 2**31 - 16, 2**30, 2**17
    out, entries = (torch.zeros(16, 16, dtype=torch.int64, device=DEVICE) for _ in range(2))
    given = (HeadArguments(out, batch, head, row), 7, 2**15, out, entries)
    launch.launch(_offsets, (1,), DEVICE, *given, C=Constants(16, 16, 16, 16))
    i = torch.arange(16, device=DEVICE)
    expected = 3 * batch + 7 * head + (2**15 + i[:, None]) * row + i[None, :]
    assert torch.equal(out, 8 * expected)
    assert torch.equal(entries, expected)


@pytest.mark.parametrize("rate", [0.0, 1e-12, 0.1, 0.5, 0.9, 1 - 1e-12])
def test_dropout_keeps_the_mean(rate: float) -> None:
    """The probability of a weight's being kept, and the factor of kept ones."""
    drop_below, rescale = dropout_numbers(rate)
    kept = (2**31 - drop_below) / 2**32
    assert abs(kept - (1 - rate)) <= 2**-16
    assert kept * rescale == pytest.approx(1, rel=1e-15)


@triton.jit
def _philox(counters, keys, out):
    at = 4 * tl.program_id(0)
    c0, c1, c2, c3 = (
        tl.load(counters + at).to(tl.uint32),
        tl.load(counters + at + 1).to(tl.uint32),
        tl.load(counters + at + 2).to(tl.uint32),
        tl.load(counters + at + 3).to(tl.uint32),
    )
    numbers = score_math.philox(tl.load(keys + tl.program_id(0)), c0, c1, c2, c3)
    for i in tl.static_range(4):
        tl.store(out + at + i, numbers[i].to(tl.int64))


def test_philox_gives_the_published_numbers() -> None:
    """Salmon et al., Random123, kat_vectors: counters and key of zeros, of ones, and of the digits of π."""
    pi, ones = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], 2**32 - 1
    counters = torch.tensor([[0] * 4, [ones] * 4, pi], device=DEVICE)
    out = torch.empty(3, 4, dtype=torch.int64, device=DEVICE)
    launch.launch(_philox, (3,), DEVICE, counters, torch.tensor([0, -1, 0x299F31D0_A4093822], device=DEVICE), out)
    assert out.tolist() == [
        [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48],
        [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662],
        [0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A],
    ]
