"""Other implementations in the attention benchmark: what they compute, and why they are absent."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, whose language the cases import")

import bench_checks as checks
from bench_cases import Case, draw, exactly, oracle
from bench_implementations import nothing
from bench_rivals import FLASH_3, FLASH_4, FLEX_FLASH, FUSED_RIVALS, SEPARATE_RIVALS, dense_mask
from error_budget import error

from hf_qknorm.ops import reference

CPU = torch.device("cpu")
SMALL = Case(2, 1, 16, 40)
MASKED = (replace(SMALL, window=16), replace(SMALL, lengths=(25, 10, 5)))
HERE = [x for x in (*FUSED_RIVALS, *SEPARATE_RIVALS) if not x.missing(SMALL, "cpu")]


@pytest.mark.parametrize(
    ("implementation", "reason"),
    [
        (FLEX_FLASH, "absent: there is no module flash_attn.cute"),
        (FLASH_3, "absent: there is no module flash_attn_interface"),
        (FLASH_4, "absent: there is no module flash_attn.cute"),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_what_is_absent_says_so(implementation, reason, monkeypatch):
    monkeypatch.setattr("bench_rivals.absent", lambda module: not module.startswith("torch."))
    assert implementation in FUSED_RIVALS
    assert re.match(reason, implementation.missing(SMALL, "cuda"))


def of_rows(q, k, v, causal, softcap):
    """As FlashAttention takes heads: behind rows; some versions return the log-sum-exp too."""
    heads = (x.transpose(1, 2) for x in (q, k, v))
    return reference.attention(*heads, causal=causal, softcap=softcap).out.transpose(1, 2), None


@pytest.mark.parametrize(
    ("implementation", "module"),
    [(FLASH_3, "flash_attn_interface"), (FLASH_4, "flash_attn.cute")],
    ids=lambda x: getattr(x, "name", ""),
)
def test_functions_that_are_absent_here_would_get_their_arguments(implementation, module, monkeypatch):
    for name in filter(None, (module.rpartition(".")[0], module)):
        if name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[module], "flash_attn_func", of_rows, raising=False)
    case = Case(4, 2, 64, 128)
    verdicts = checks.judge_implementation(implementation, case, draw(case, 1, CPU, torch.float32)[0])
    assert verdicts.keys() == {"out", "dq", "dk", "dv"}
    assert all(verdict.passed for verdict in verdicts.values())


@pytest.mark.parametrize("case", [SMALL, *MASKED], ids=str)
def test_work_counts_visible_keys_only(case):
    (x,) = draw(case, 1, CPU, torch.float32)
    seen = reference.visible(case.length, case.length, True, case.window)
    if x.ranges is not None:
        keys = torch.arange(case.length)
        seen = seen & (keys >= x.ranges[0, :, :1]) & (keys < x.ranges[0, :, 1:])
    whole = case.length if case.window is None else case.window  # the diagonal counts half
    assert case.pairs == int(seen.sum()) - whole / 2
    assert case.flop == 4 * case.pairs * case.heads * case.head_dim
    assert torch.equal(dense_mask(case, x)[0, 0] == 0, seen)


@pytest.mark.parametrize(
    ("implementation", "case"),
    [(x, SMALL) for x in HERE] + [(x, case) for x in HERE if x.mask is not nothing for case in MASKED],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_other_implementations_compute_the_same(implementation, case):
    (x,) = implementation.prepared(case, draw(case, 1, CPU, torch.float32))
    exact = oracle(case, exactly(x), implementation.normed, implementation.softcap)
    assert error(implementation.attend(case, x).detach(), exact.detach()) < 1e-6
