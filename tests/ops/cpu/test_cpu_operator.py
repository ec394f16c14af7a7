"""The operator `cpu_attention`: torch's checks, what it refuses, numbers that are not finite, and its memory."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import opcheck

from hf_qknorm.ops.cpu import attention as cpu
from hf_qknorm.ops.cpu import build, norm_rope
from hf_qknorm.ops.types import Call, Heads, Norm, Options, Visible
from qknorm_tests.cpu_cases import cpu_dropout, cpu_results
from qknorm_tests.error_budget import assert_within_budget
from qknorm_tests.memory import LargestStorage
from qknorm_tests.operator_calls import call
from qknorm_tests.random_qkv import make_qkv
from qknorm_tests.tiled_cases import Case, draw_inputs, oracle_results

SINKS = torch.linspace(-1, 2, 4)
RANGES = torch.tensor([[(max(t - 3 * b, 0), t + b) for t in range(9)] for b in range(2)], dtype=torch.int32)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "capped": {"softcap": 5.0, "causal": True},
    "window": {"softcap": 5.0, "causal": True, "window": 4},
    "ranges": {"softcap": 5.0, "ranges": RANGES},
    "sinks": {"softcap": 70.0, "sinks": SINKS, "causal": True},
    "dropout": {"dropout": 0.25, "softcap": 5.0},
}
CAPPED = Options(0.25, 5.0, causal=True)


def attend(heads: Heads, visible: Visible, options: Options) -> Tensor:
    return cpu.attention(Call(heads, visible, options))


@pytest.mark.parametrize("name", OPTIONS)
def test_the_operators_pass_torchs_opcheck(name: str) -> None:
    q, k, v = (x.detach() for x in make_qkv(2, 4, 2, 9, 9, 16))
    seed = torch.tensor([3]) if "dropout" in OPTIONS[name] else None
    heads, visible, options = call(q, k, v, **OPTIONS[name])
    values = (*heads[:3], *visible._replace(seed=seed)[:3], *options)
    for gradients in (False, True):
        opcheck(build.overload("forward"), (*values, gradients), test_utils=("test_schema", "test_faketensor"))


def test_the_output_is_laid_out_for_the_output_projection() -> None:
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in make_qkv(2, 4, 2, 9, 9, 16))
    out = attend(*call(q, k, v, softcap=5.0))
    assert out.transpose(1, 2).is_contiguous()
    assert torch.equal(out, attend(*call(q.contiguous(), k.contiguous(), v.contiguous(), softcap=5.0)))
    gaps = (torch.stack([x, x], -1)[..., 0] for x in (q, k, v))
    assert torch.equal(out, attend(*call(*gaps, softcap=5.0)))


REFUSED = [
    ({"mask": torch.ones(1, 1, 5, 5, dtype=torch.bool)}, r"the mask \[1, 1, 5, 5\] is an arbitrary one"),
    ({"dtype": torch.float64}, "kernels take float32, bfloat16, float16, and the heads are float64"),
    ({"head_dim": 257}, "a head_dim of up to 256, and it is 257"),
    ({"q_norm": Norm("rms")}, "heads after norm and rotation"),
]


@pytest.mark.parametrize(("wrong", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_calls_that_it_does_not_take_have_a_reason(wrong: dict[str, Any], message: str) -> None:
    head_dim, dtype = wrong.pop("head_dim", 8), wrong.pop("dtype", torch.float32)
    arguments = call(*make_qkv(1, 2, 1, 5, 5, head_dim, dtype=dtype), **wrong)
    assert cpu.why_not(Call(*call(*make_qkv(1, 2, 1, 5, 5, 8)))) is None
    assert re.search(message, str(cpu.why_not(Call(*arguments))))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("heads", [2, 4])
def test_each_run_gives_the_same_bits(heads: int, threads: int) -> None:
    """With few heads, threads share the keys of a head."""
    case = Case(batch=1, heads=heads, heads_kv=heads, queries=1030, head_dim=4, causal=True, softcap=5.0, dropout=0.1)
    inputs, before = draw_inputs(case, torch.float32), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        runs = [cpu_results(case, inputs) for _ in range(3)]
        assert cpu._key_parts(inputs.q, inputs.k) == (1 if threads == 1 else 2)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(run[name], result) for run in runs[1:] for name, result in runs[0].items())
    dropped = cpu_dropout(case, inputs)
    assert dropped is not None
    exact, eager = (
        oracle_results(case, inputs.to(torch.float64), dropped.double()),
        oracle_results(case, inputs, dropped),
    )
    for name, result in runs[0].items():
        assert_within_budget(result, exact[name], eager[name], name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_larger_than_the_heads_is_allocated(dtype: torch.dtype) -> None:
    q, k, v = make_qkv(1, 8, 2, 512, 512, 16, dtype=dtype)
    with LargestStorage() as largest:
        attend(Heads(q, k, v), Visible(), CAPPED).sum().backward()
        with torch.no_grad():
            attend(Heads(q[:, :, :1], k, v), Visible(), CAPPED)
    assert largest.elements == q.numel()


def test_uninitialised_memory_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(queries=150, keys=90, causal=True, softcap=5.0, ranges="left_padding", head_dim=24)
    inputs, one = draw_inputs(case, torch.bfloat16), replace(case, queries=1)
    few = draw_inputs(one, torch.bfloat16)
    expected = cpu_results(case, inputs) | {"few": attend(few.heads, few.visible, one.options)}
    plain = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *args, **kwargs: plain(*args, **kwargs).fill_(torch.nan))
    torch.use_deterministic_algorithms(True)  # the C++ code's own tensors are filled with NaN
    try:
        results = cpu_results(case, inputs) | {"few": attend(few.heads, few.visible, one.options)}
    finally:
        torch.use_deterministic_algorithms(False)
    for name, result in results.items():
        assert torch.equal(result, expected[name]), name


def test_hidden_keys_of_few_rows_are_never_read() -> None:
    """Caches have room that was never written: 0 times NaN would be NaN."""
    q, k, v = (x.detach() for x in make_qkv(1, 4, 2, 1, 50, 32))
    for span in ((5, 43), (0, 1), (17, 50)):
        visible = Visible(torch.tensor([[span]], dtype=torch.int32))
        expected = attend(Heads(q, k, v), visible, CAPPED)
        hidden = torch.ones(50, dtype=torch.bool)
        hidden[slice(*span)] = False
        poisoned = (x.masked_fill(hidden[:, None], torch.nan) for x in (k, v))
        assert torch.equal(attend(Heads(q, *poisoned), visible, CAPPED), expected)


@pytest.mark.costly
def test_forward_mode_is_refused() -> None:
    q, k, v = (x.detach() for x in make_qkv(1, 4, 2, 9, 9, 16))
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda x: attend(*call(x, k, v)), (q,), (q,))


def test_forward_mode_is_refused_by_the_norms_without_gradients_too() -> None:
    """Without gradients the operator's own checks are left out."""
    x, gain = torch.ones(1, 2, 3, 16), torch.ones(16)
    with torch.no_grad(), forward_ad.dual_level():
        norm = Norm("rms", forward_ad.make_dual(gain, gain))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            norm_rope.norm_rope(Heads(x, x, x, norm, Norm()))
