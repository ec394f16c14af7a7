"""Launches: tiles by size, variants of the inner loop by the logits' bound, heads in the copy engine's layout."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from hf_qknorm.ops.triton import launch
from hf_qknorm.ops.triton.architectures import ARCHITECTURES
from hf_qknorm.ops.triton.arguments import Constants, HeadArguments
from hf_qknorm.ops.triton.head_tiles import _addresses
from hf_qknorm.ops.triton.launch import as_tiles, dense
from qknorm_tests.norm_cases import DEVICE, lay_out

FULL, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16


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


def heads(head_dim: int = 40, dtype: torch.dtype = BRAIN) -> torch.Tensor:
    return torch.randn(2, 3, 5, head_dim, device=DEVICE).to(dtype)


@pytest.mark.parametrize("layout", ["heads", "tokens"])
def test_aligned_heads_are_not_copied(layout: str) -> None:
    x = lay_out(heads(), layout)
    assert dense(x) is x
    assert dense(x[:, :2, 1:]).data_ptr() == x[:, :2, 1:].data_ptr()


@pytest.mark.parametrize(
    "x",
    [
        lay_out(heads(), "sparse"),
        heads(20),  # rows of 40 bytes
        heads(48)[..., 4:44],  # starts 8 bytes in
        heads(41)[..., :40],
        torch.randn(1, 1, 1, 40, device=DEVICE).to(BRAIN).expand(2, 3, 5, 40),
        heads()[:, :, :1].expand(-1, -1, 5, -1),
    ],
    ids=["sparse", "short rows", "offset", "odd rows", "expanded", "one row"],
)
def test_other_heads_are_copied(x: torch.Tensor) -> None:
    copied = dense(x)
    assert copied.is_contiguous()
    assert torch.equal(copied, x)


def test_the_stride_of_an_axis_of_one_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never used, but aligned loads need a multiple of 16 bytes."""
    x = torch.randn(5, 40, device=DEVICE).to(BRAIN).as_strided((1, 1, 5, 40), (3, 0, 40, 1))
    assert dense(x) is x
    monkeypatch.setattr(launch, "architecture", lambda device: ARCHITECTURES[9, 0])
    made = as_tiles(x, 4)
    assert made.shape == [1, 1, 5, 40]
    assert made.strides == [16, 16, 40, 1]
    assert made.block_shape == [1, 1, 4, 64]
    monkeypatch.setattr(launch, "architecture", lambda device: ARCHITECTURES[8, 0])
    assert as_tiles(x, 4) == (x, 16, 16, 40)


@triton.jit
def _offsets(X, head, start, out, C: tl.constexpr):
    at = _addresses(X, tl.program_id(0) + 3, head, start, C.BLOCK_M, C.PADDED).to(tl.int64) - X.data.to(tl.int64)
    tl.store(out + tl.arange(0, C.BLOCK_M)[:, None] * C.PADDED + tl.arange(0, C.PADDED)[None, :], at)


def test_addresses_have_64_bits() -> None:
    out = torch.zeros(16, 16, dtype=torch.int64, device=DEVICE)
    batch, head, row = 2**31 - 16, 2**30, 2**17
    launch.launch(
        _offsets, (1,), DEVICE, HeadArguments(out, batch, head, row), 7, 2**15, out, C=Constants(16, 16, 16, 16)
    )
    i = torch.arange(16, device=DEVICE)
    assert torch.equal(out, 8 * (3 * batch + 7 * head + (2**15 + i[:, None]) * row + i[None, :]))
