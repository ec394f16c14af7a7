"""Dropout of fused attention, whose mask each kernel draws again, and the statistics of its logits."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_qknorm.ops.triton import attention, score_math
from hf_qknorm.ops.triton.launch import dropout_numbers, launch
from hf_qknorm.ops.types import Heads, Visible
from qknorm_tests.error_budget import assert_within_budget
from qknorm_tests.kernel_cases import DEVICE, Problem, Raw, plain_problem, raw_problem, shrink_tiles
from qknorm_tests.tiled_cases import Case

FULL, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16


def drawn(problem: Problem) -> Tensor:
    """The mask `[B, H, T, S]` that multiplies the weights, read from the output for an identity as values."""
    q, k = problem.heads[:2]
    length, size = k.shape[2:]
    parts = []
    for start in range(0, length, size):
        v = torch.zeros_like(k, dtype=FULL)
        v[:, :, start : start + size] = torch.eye(size, device=DEVICE)[: length - start]
        heads = Heads(torch.zeros_like(q, dtype=FULL), torch.zeros_like(k, dtype=FULL), v)
        options = problem.options._replace(causal=False, window=None, softcap=None)
        parts.append(attention.forward(heads, Visible(seed=problem.visible.seed), options).out)
    kept = torch.cat(parts, -1)[..., :length] > 0
    return kept * dropout_numbers(problem.options.dropout)[1]


DROPOUT = [
    (Case(batch=1, queries=60, head_dim=32, causal=True, dropout=0.3), FULL, None),
    (Case(batch=1, heads=8, queries=33, head_dim=40, softcap=5.0, sinks=True, dropout=0.1), HALF, None),
    (Case(queries=40, head_dim=40, ranges="packed", dropout=0.3), HALF, None),
    (
        Case(causal=True, softcap=50.0, dropout=0.3),
        BRAIN,
        Raw(head_dim=32, length=50, rotary=(32, "half"), heads=(2, 1), dtype=BRAIN),
    ),
]


@pytest.mark.parametrize(("case", "dtype", "raw"), DROPOUT, ids=str)
def test_forward_and_backward_drop_the_same_weights(
    case: Case, dtype: torch.dtype, raw: Raw | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = plain_problem(case, dtype) if raw is None else raw_problem(raw, case)
    mask = drawn(problem)
    shrink_tiles(monkeypatch)
    problem.check(mask)


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
    counter = counters + at
    numbers = score_math.philox(
        tl.load(keys + tl.program_id(0)),
        tl.load(counter).to(tl.uint32),
        tl.load(counter + 1).to(tl.uint32),
        tl.load(counter + 2).to(tl.uint32),
        tl.load(counter + 3).to(tl.uint32),
    )
    for i in tl.static_range(4):
        tl.store(out + at + i, numbers[i].to(tl.int64))


def test_philox_gives_the_published_numbers() -> None:
    """Salmon et al., Random123, kat_vectors: counters and key of zeros, of ones, and of the digits of π."""
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    ones = 2**32 - 1
    counters = torch.tensor([[0] * 4, [ones] * 4, pi], device=DEVICE)
    keys = torch.tensor([0, -1, 0x299F31D0_A4093822], device=DEVICE)
    expected = [
        [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48],
        [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662],
        [0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A],
    ]
    out = torch.empty(3, 4, dtype=torch.int64, device=DEVICE)
    launch(_philox, (3,), DEVICE, counters, keys, out)
    assert out.tolist() == expected


STATISTICS = [
    (Case(causal=True), FULL, None),
    (Case(batch=1, softcap=50.0, spread=3.0), BRAIN, None),
    (Case(batch=1, softcap=70.0, causal=True, window=20, spread=3.0), HALF, None),
    (Case(batch=1, queries=80, keys=40, causal=True, head_dim=72), HALF, None),
    (Case(ranges="packed", queries=40, sinks=True), BRAIN, None),
    (Case(batch=1, queries=40, dropout=0.3, softcap=50.0), FULL, None),
    (Case(causal=True), BRAIN, Raw(dtype=BRAIN, heads=(4, 2), length=50, norms=("none", "none"), spread=5.0)),
    (Case(softcap=50.0, window=9), HALF, Raw(dtype=HALF, heads=(4, 2), norms=("l2", "layer"), length=50)),
]


@pytest.mark.parametrize(("case", "dtype", "raw"), STATISTICS, ids=str)
def test_statistics_equal_the_oracles(
    case: Case, dtype: torch.dtype, raw: Raw | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink_tiles(monkeypatch)
    problem = plain_problem(case, dtype) if raw is None else raw_problem(raw, case)
    result = attention.forward(problem.heads, problem.visible, problem.options, statistics=True)
    exact, eager = (
        problem.attended({name: x.detach().to(wide) for name, x in problem.leaves.items()})
        for wide in (torch.float64, dtype)
    )
    rows = (exact.weights.sum(-1) > 0).sum((0, 2)).clamp_min(1)
    assert_within_budget(result.largest.amax((0, 2)), exact.max_logit, eager.max_logit, "largest")
    assert_within_budget(result.entropy.sum((0, 2)) / rows, exact.entropy, eager.entropy, "entropy")
    without = attention.forward(problem.heads, problem.visible, problem.options)
    assert without.largest is None
    assert without.entropy is None
    assert torch.equal(result.out, without.out)
    assert torch.equal(result.normaliser, without.normaliser)
