"""Tiles of heads by descriptors and by pointers: bounds, and attention against the oracle."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from hf_qknorm.ops.triton import launch
from hf_qknorm.ops.triton.architectures import ARCHITECTURES
from hf_qknorm.ops.triton.arguments import Constants, HeadArguments
from hf_qknorm.ops.triton.head_tiles import _addresses
from qknorm_tests.kernel_cases import Raw, plain_problem, raw_problem, shrink_tiles, use_pointers
from qknorm_tests.norm_cases import DEVICE
from qknorm_tests.tiled_cases import Case

FULL, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
ONE = {"batch": 1, "heads": 2, "heads_kv": 1}
PAIR = {"heads": 2, "heads_kv": 1}
GROUP = {"batch": 1, "heads": 6, "heads_kv": 2}
WAYS = pytest.mark.parametrize("architecture", [ARCHITECTURES[x] for x in ((9, 0), (8, 0))], ids=["tma", "pointers"])


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


PLAIN = [
    (Case(**ONE, queries=1, keys=63, causal=True, head_dim=40), BRAIN),
    (Case(**ONE, queries=64, keys=64, causal=True, head_dim=64), BRAIN),
    (Case(**ONE, queries=63, causal=True, window=20, head_dim=40), HALF),
    (Case(**ONE, queries=40, keys=63, window=9, head_dim=16, softcap=50.0), FULL),
    (Case(**PAIR, queries=40, keys=63, ranges="right_padding", softcap=5.0), FULL),
    (Case(**GROUP, queries=20, sinks=True, ranges="left_padding", softcap=100.0), BRAIN),
]


@pytest.mark.parametrize(("case", "dtype"), PLAIN, ids=str)
def test_output_and_gradients(case, dtype, monkeypatch):
    shrink_tiles(monkeypatch)
    use_pointers(monkeypatch)
    plain_problem(case, dtype).check()


PADDED = [
    (Case(**GROUP, queries=33, keys=40, causal=True, head_dim=80, softcap=5.0), HALF),
    (Case(**PAIR, queries=40, ranges="packed", head_dim=96), BRAIN),
    (Case(**GROUP, queries=40, causal=True, window=20, head_dim=96, sinks=True), FULL),
    (Case(**ONE, queries=40, keys=33, head_dim=192, softcap=50.0), BRAIN),
    (Case(**ONE, queries=33, causal=True, head_dim=152), HALF),
]


@WAYS
@pytest.mark.parametrize(("case", "dtype"), PADDED, ids=str)
def test_heads_with_columns_of_padding(case, dtype, architecture, monkeypatch):
    shrink_tiles(monkeypatch)
    monkeypatch.setattr(launch, "architecture", lambda device: architecture)
    plain_problem(case, dtype).check()


RAW = [
    (Raw(head_dim=64, length=40, dtype=BRAIN, rotary=(64, "half"), knee=4.0, heads=(4, 2)), Case(causal=True)),
    (Raw(norms=("layer", "rms"), head_dim=40, length=33, rotary=(40, "half"), layout="gaps"), Case(softcap=50.0)),
    (Raw(head_dim=128, length=33, dtype=HALF, rotary=(128, "half"), knee=0.5), Case(window=9)),
]


@pytest.mark.parametrize(("raw", "case"), RAW, ids=str)
def test_output_and_gradients_of_raw_heads(raw, case, monkeypatch):
    shrink_tiles(monkeypatch)
    use_pointers(monkeypatch)
    raw_problem(raw, case).check()
