"""FlexAttention with cap, ranges, window and sinks, against the specification: forward, which is all that a CPU has.

Its mathematics runs uncompiled: inductor's C++ code for a mask with a tensor of ranges does not compile in torch 2.13.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as torch_flex

from hf_qknorm.ops import flex, reference
from hf_qknorm.ops.types import Heads, Options, Visible
from qknorm_tests.error_budget import assert_within_budget
from qknorm_tests.operator_calls import call
from qknorm_tests.tiled_cases import Case, draw_inputs

FULL, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
CASES = [
    (Case(queries=300, causal=True, softcap=5.0), BRAIN),
    (Case(queries=300, causal=True, window=70, sinks=True), FULL),
    (Case(queries=400, causal=True, window=200), FULL),  # some queries of a block see another block whole
    (Case(queries=300, keys=400, window=70, softcap=5.0, heads=6), FULL),
    (Case(queries=150, keys=290, ranges="left_padding", sinks=True, softcap=5.0), HALF),
    (Case(queries=260, ranges="packed", sinks=True), FULL),
    (Case(queries=128, ranges="shared", head_dim=40, softcap=50.0), BRAIN),
    (Case(queries=300, keys=257, causal=True, window=20, heads=2), FULL),  # early queries see nothing
]


def drawn(case: Case, dtype: torch.dtype) -> tuple[Heads, Visible, Options]:
    """The case's call, with a scale of its own."""
    x = draw_inputs(case, dtype)
    sinks = None if x.sinks is None else x.sinks.detach()
    options = case.options._replace(scale=0.3)
    return Heads(x.q.detach(), x.k.detach(), x.v.detach()), Visible(x.ranges, sinks), options


def attended(heads: Heads, visible: Visible, options: Options, dtype: torch.dtype) -> Tensor:
    """The specification's output, computed in `dtype`."""
    return reference.attend(Heads(*(x.to(dtype) for x in heads[:3])), visible, options).out


def check(case: Case, dtype: torch.dtype) -> None:
    inputs = drawn(case, dtype)
    got = flex.attention(*inputs)
    assert got.dtype == dtype
    assert_within_budget(got, *(attended(*inputs, x) for x in (torch.float64, dtype)))


@pytest.mark.parametrize(("case", "dtype"), CASES, ids=str)
def test_its_output_is_the_specifications(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex, "_compiled", lambda: torch_flex.flex_attention)
    check(case, dtype)


@pytest.mark.costly
def test_new_lengths_and_scales_need_no_new_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second length makes the graph's lengths dynamic, and a scale of its own is no part of it."""
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("eager")
    compiled = torch.compile(
        lambda *arguments, **options: torch_flex.flex_attention(*arguments, **options), backend=graphs
    )
    monkeypatch.setattr(flex, "_compiled", lambda: compiled)
    for batch, length, scale in ((2, 300, 0.3), (3, 420, 0.3), (4, 500, 0.25), (5, 280, 0.1)):
        case = Case(batch=batch, queries=length, ranges="left_padding", softcap=5.0)
        heads, visible, options = drawn(case, FULL)
        options = options._replace(scale=scale)
        got = flex.attention(heads, visible, options)
        assert_within_budget(got, *(attended(heads, visible, options, x) for x in (torch.float64, FULL)))
    assert graphs.frame_count == 2


@pytest.mark.parametrize("case", [case for case, _ in CASES], ids=str)
def test_the_blocks_are_those_that_any_query_and_all_queries_see(case: Case) -> None:
    heads, visible, options = drawn(case, FULL)
    queries, keys, size = heads.q.shape[2], heads.k.shape[2], flex.BLOCK
    mask = flex.block_mask(*flex.spans(heads, visible, options), keys)
    seen = reference.visible(queries, keys, options.causal, options.window)[None]
    if visible.ranges is not None:
        seen = seen & reference.in_ranges(visible.ranges, keys)[:, 0]
    rows, cols = -(-queries // size), -(-keys // size)
    some, whole = torch.zeros(len(seen), rows, cols), torch.zeros(len(seen), rows, cols)
    for row in range(rows):
        for col in range(cols):
            block = seen[:, row * size : (row + 1) * size, col * size : (col + 1) * size]
            some[:, row, col] = block.flatten(1).any(1)
            whole[:, row, col] = block.flatten(1).all(1) * (block.shape[2] == size)
    partial = dense(mask.kv_num_blocks, mask.kv_indices)
    full = dense(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert torch.equal(full, whole)
    assert not (partial * full).any()
    assert (partial + full >= some).all()
    assert torch.equal(partial + full, some) or not seen.any(-1).all()  # queries that see nothing may touch a block
    rows, cols = (torch.arange(n) for n in (queries, keys))
    for batch in range(len(seen)):
        got = mask.mask_mod(torch.tensor(batch), torch.tensor(0), rows[:, None], cols)
        assert torch.equal(got, seen[batch])


def dense(counts: Tensor, indices: Tensor) -> Tensor:
    """1 for each block in the lists, `[B, rows, columns]`."""
    listed = torch.arange(indices.shape[-1]) < counts[..., None]
    return torch.zeros(indices.shape).scatter(-1, indices.long(), listed.float())[:, 0]


REFUSED = {
    "arbitrary": {"mask": torch.ones(1, 1, 200, 200, dtype=torch.bool)},
    "no dropout": {"dropout": 0.1},
    "at least 128 queries": {"length": 127},
    "head_dim of 16 to 256": {"head_dim": 8},
    "fp32, bf16 and fp16": {"dtype": torch.float64},
    "nothing to attend": {"empty": True},
    "no backward on cpu": {},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_other_calls_are_refused_with_the_reason(reason: str) -> None:
    options = dict(REFUSED[reason])
    shape = 1, 2, options.pop("length", 200), options.pop("head_dim", 16)
    q = torch.zeros(shape, dtype=options.pop("dtype", FULL))
    k = q[:, :, :0] if options.pop("empty", False) else q
    assert reason in str(flex.why_not(*call(q, k, k, **options)))


@pytest.mark.parametrize(("capability", "dtype", "served"), [(7, BRAIN, False), (7, HALF, True), (8, BRAIN, True)])
def test_gpus_without_bf16_take_fp16(capability, dtype, served, monkeypatch):
    flex._why_not_here.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 5))
    monkeypatch.setattr(flex, "find_spec", lambda name: name)
    assert (flex._why_not_here(torch.device("cuda:0"), dtype) is None) == served
    monkeypatch.setattr(flex, "find_spec", lambda name: None)
    flex._why_not_here.cache_clear()
    assert "Triton is not installed" in str(flex._why_not_here(torch.device("cuda:0"), dtype))
    monkeypatch.setattr(flex, "find_spec", lambda name: name)
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    flex._why_not_here.cache_clear()
    assert "torch.compile is switched off" in str(flex._why_not_here(torch.device("cuda:0"), dtype))
    flex._why_not_here.cache_clear()
