"""Attention of a few queries over many keys against the oracle."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from hf_qknorm.ops import reference
from hf_qknorm.ops.triton import attention_decode
from hf_qknorm.ops.triton.launch import LOG2E
from hf_qknorm.ops.types import Heads, Options, Visible
from qknorm_tests.error_budget import assert_within_budget
from qknorm_tests.norm_cases import DEVICE, lay_out
from qknorm_tests.random_qkv import make_qkv

HALF, BRAIN = torch.float16, torch.bfloat16


class Case(NamedTuple):
    """One call. The first batch entry sees `filled` keys, the second all of these but two on the left."""

    queries: int = 1
    keys: int = 600
    heads: tuple[int, int] = (8, 2)
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    softcap: float | None = 50.0
    causal: bool = True
    window: int | None = None
    sinks: bool = False
    filled: int | None = None
    splits: int | None = None
    spread: float = 1.0
    batch: int = 2

    def __str__(self) -> str:
        changed = [f"{name}={x}" for name, x in self._asdict().items() if x != self._field_defaults[name]]
        return "-".join(changed).replace("torch.", "") or "plain"

    @property
    def rows(self) -> int:
        """The queries of a group's heads."""
        return self.heads[0] // self.heads[1] * self.queries

    @property
    def options(self) -> Options:
        if self.filled is not None:  # ranges replace causality: the last query is not at the last key
            return Options(self.head_dim**-0.5, self.softcap)
        return Options(self.head_dim**-0.5, self.softcap, self.causal, self.window)

    @property
    def ranges(self) -> Tensor | None:
        """The ranges of a causal mask over a static cache with left padding."""
        if self.filled is None:
            return None
        stop = torch.arange(self.filled - self.queries, self.filled) + 1
        start = torch.tensor([0, 2])[:, None].expand(-1, self.queries)
        if self.window is not None:
            start = torch.maximum(start, stop - self.window)
        stop = torch.maximum(stop, start)
        return torch.stack([start, stop], -1).to(DEVICE, torch.int32)


CASES = [
    Case(),
    Case(softcap=None, heads=(2, 2), head_dim=80, dtype=BRAIN, keys=500),
    Case(softcap=100.0, heads=(7, 1), head_dim=128, dtype=BRAIN),
    Case(heads=(4, 1), head_dim=96, dtype=HALF, queries=3),
    Case(keys=1, heads=(7, 1), dtype=BRAIN),
    Case(keys=3, softcap=None, spread=20.0),
    Case(keys=255, queries=3, heads=(2, 2), head_dim=128),
    Case(keys=257, queries=3, heads=(7, 1), head_dim=128, dtype=BRAIN, splits=2),
    Case(queries=3, splits=17, keys=300, head_dim=96, spread=6.0, softcap=None),
    Case(splits=5, heads=(8, 1), queries=8, dtype=BRAIN, head_dim=80),
    Case(window=103, queries=3, splits=4, dtype=BRAIN, sinks=True),
    Case(window=2**31 - 1, causal=False, queries=3, keys=300, splits=2),
    Case(causal=False, queries=3, keys=257, sinks=True, softcap=100.0, splits=2),
    Case(filled=300, queries=3, heads=(4, 1), dtype=BRAIN, head_dim=96),
    Case(filled=300, heads=(7, 1), sinks=True, splits=9, dtype=HALF),
    Case(filled=500, queries=3, window=150, softcap=None, splits=2, head_dim=80),
    Case(filled=2, queries=2, keys=257, splits=2, dtype=BRAIN, softcap=None),
    Case(keys=130, head_dim=256, dtype=BRAIN, sinks=True, splits=2),
    Case(keys=150, queries=23, heads=(7, 1), sinks=True, splits=3),  # 161 rows in three blocks
    Case(keys=130, queries=40, heads=(4, 2), dtype=BRAIN, window=20, splits=2),
    Case(filled=100, keys=256, queries=35, heads=(2, 1), dtype=HALF, softcap=None, splits=3),
]


class Call(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    visible: Visible

    def run(self, case: Case) -> tuple[Tensor, Tensor]:
        return attention_decode.forward(*self, case.options)


def draw(case: Case, seed: int = 0) -> Call:
    """The call's tensors on the device; keys beyond the filled part of the cache are large."""
    shape = (case.batch, *case.heads, case.queries, case.keys, case.head_dim)
    heads = make_qkv(*shape, dtype=case.dtype, spread=case.spread, seed=seed)
    q, k, v = (x.detach().to(DEVICE) for x in heads)
    if case.filled is not None:
        for x in (k, v):
            x[:, :, case.filled :] = 3e4 * torch.randn_like(x[:, :, case.filled :]).sign()
    sinks = torch.linspace(-9.0, 9.0, case.heads[0]).to(DEVICE, case.dtype) if case.sinks else None
    return Call(q, k, v, Visible(case.ranges, sinks))


def plain(call: Call, case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The oracle's output, and log2-sum-exp2 `[B, H, T]`, computed in `dtype`."""
    q, k, v = (x.to(dtype) for x in call[:3])
    ranges, sinks, *_ = call.visible
    out = reference.attend(Heads(q, k, v), call.visible, case.options).out
    logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * case.head_dim**-0.5
    if case.softcap is not None:
        logits = case.softcap * torch.tanh(logits / case.softcap)
    seen = reference.visible(case.queries, case.keys, case.options.causal, case.options.window, DEVICE)
    if ranges is not None:
        seen = reference.in_ranges(ranges, case.keys)
    logits = logits.masked_fill(~seen, -math.inf)
    if sinks is not None:
        sink = sinks.to(dtype).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sink], -1)
    lse = logits.logsumexp(-1) * LOG2E
    return out, lse.masked_fill(lse == -math.inf, math.inf)


def force(monkeypatch: pytest.MonkeyPatch, splits: int | None) -> None:
    if splits is not None:
        monkeypatch.setattr(attention_decode, "splits", lambda q, k: splits)


def log2_of(found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The output, and log2-sum-exp2 `[B, H, T]` of its normaliser; +∞ without keys."""
    out, (peak, total) = found[0], found[1].unbind(-1)
    return out, torch.where(total == 0, math.inf, peak + total.log2())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_log_sum_exp(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare errors over many rows, of several calls if needed: that of one row depends on its few keys."""
    force(monkeypatch, case.splits)
    rows, wanted = case.batch * case.heads[0] * case.queries, 24 if case.spread <= 3 else 96
    calls = [draw(case, seed) for seed in range(math.ceil(wanted / rows))]
    outs, lses = zip(*(log2_of(call.run(case)) for call in calls), strict=True)
    for call, out in zip(calls, outs, strict=True):
        assert out.transpose(1, 2).is_contiguous()
        assert out.dtype == case.dtype
        assert not out[~reached(call, case)].any()
    (exact, exact_lse), (eager, eager_lse) = (
        tuple(torch.cat(x) for x in zip(*(plain(call, case, dtype) for call in calls), strict=True))
        for dtype in (torch.float64, case.dtype)
    )
    lse = torch.cat(lses)
    assert_within_budget(torch.cat(outs), exact, eager, "out")
    finite = exact_lse.isfinite()
    assert torch.equal(lse.isfinite(), finite)
    assert_within_budget(lse[finite], exact_lse[finite], eager_lse[finite], "lse")


def reached(call: Call, case: Case) -> Tensor:
    """Which queries see a key, `[B, H, T]`."""
    if call.visible.ranges is None:
        seen = reference.visible(case.queries, case.keys, case.causal, case.window, DEVICE).any(-1)
    else:
        seen = (call.visible.ranges[..., 1] > call.visible.ranges[..., 0])[:, None]
    return seen.expand(call.q.shape[:3])


@pytest.mark.parametrize(("sink", "softcap"), [(-math.inf, 50.0), (-90.0, None), (40.0, 50.0), (300.0, None)])
def test_sinks_of_any_size(sink: float, softcap: float | None) -> None:
    """Sums without a maximum are combined with sinks that overflow without one."""
    case = Case(keys=512, softcap=softcap, queries=2, heads=(2, 1))
    call = draw(case)
    sinks = torch.tensor([sink, 0.0], device=DEVICE)
    call = call._replace(visible=Visible(None, sinks))
    out, lse = log2_of(call.run(case))
    (exact, exact_lse), (eager, eager_lse) = plain(call, case, torch.float64), plain(call, case, torch.float32)
    for head in range(2):
        assert_within_budget(out[:, head], exact[:, head], eager[:, head], "out")
        assert_within_budget(lse[:, head], exact_lse[:, head], eager_lse[:, head], "lse")


@pytest.mark.parametrize(("queries", "keys"), [("tokens", "gaps"), ("sparse", "gaps"), ("gaps", "sparse")])
def test_any_strides(queries: str, keys: str) -> None:
    case = Case(queries=3, keys=300, dtype=BRAIN)
    call = draw(case)
    view = call._replace(q=lay_out(call.q, queries), k=lay_out(call.k, keys), v=lay_out(call.v, keys))
    torch.testing.assert_close(view.run(case), call.run(case), rtol=0, atol=0)


def test_nan_reaches_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, 3)
    call = draw(Case())
    call.q[0, 0] = float("nan")
    for x in log2_of(call.run(Case())):
        assert x[0, 0].isnan().all()
        assert x[:, 1:].isfinite().all()


def meta(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")
