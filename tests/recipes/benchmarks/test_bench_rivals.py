"""Other implementations in the attention benchmark: what they compute."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, whose language the cases import")

from bench_cases import Case, draw, exactly, oracle
from bench_implementations import nothing
from bench_rivals import FUSED_RIVALS, SEPARATE

from hf_qknorm.ops import reference
from qknorm_tests.error_budget import error

CPU = torch.device("cpu")
SMALL = Case(2, 1, 16, 40)
WINDOW = replace(SMALL, window=16)
HERE = [x for x in (*FUSED_RIVALS, SEPARATE) if not x.missing(SMALL, "cpu")]


@pytest.mark.parametrize("case", [SMALL, WINDOW], ids=str)
def test_work_counts_visible_keys_only(case):
    seen = reference.visible(case.length, case.length, True, case.window)
    whole = case.length if case.window is None else case.window  # the diagonal counts half
    assert case.pairs == int(seen.sum()) - whole / 2
    assert case.flop == 4 * case.pairs * case.heads * case.head_dim


@pytest.mark.parametrize(
    ("implementation", "case"),
    [(x, SMALL) for x in HERE] + [(x, WINDOW) for x in HERE if x.mask is not nothing],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_other_implementations_compute_the_same(implementation, case):
    (x,) = implementation.prepared(case, draw(case, 1, CPU, torch.float32))
    exact = oracle(case, exactly(x), implementation.normed, implementation.softcap)
    assert error(implementation.attend(case, x).detach(), exact.detach()) < 1e-6
