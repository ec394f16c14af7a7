"""Problems for fused attention, and its and the oracle's results."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from hf_qknorm.ops import reference
from hf_qknorm.ops.triton import attention, launch, schedule
from hf_qknorm.ops.triton.architectures import ARCHITECTURES, HOPPER, SMALL, Tile
from hf_qknorm.ops.types import Heads, Options, Visible
from qknorm_tests.error_budget import assert_within_budget
from qknorm_tests.norm_cases import DEVICE, Call, draw, lay_out, spread
from qknorm_tests.norm_cases import Case as Raw
from qknorm_tests.tiled_cases import Case, draw_inputs


class Problem(NamedTuple):
    """One attention call and the gradient of its output."""

    heads: Heads
    visible: Visible
    options: Options
    grad: Tensor

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The tensors with a gradient, by name in `attention.Gradients`."""
        q, k, v, *rest = self.heads
        named = Call(q, k, *rest, 1.0).leaves | {"v": v, "sinks": self.visible.sinks}
        return {name: x for name, x in named.items() if x is not None}

    def results(self) -> dict[str, Tensor]:
        """Output and gradients of the kernels."""
        result = attention.forward(self.heads, self.visible, self.options)
        grads = attention.backward(self.grad, self.heads, self.visible, self.options, result.out, result.normaliser)
        return {"out": result.out} | {name: x for name, x in grads._asdict().items() if x is not None}

    def expected(self, dtype: torch.dtype, dropout_mask: Tensor | None = None) -> dict[str, Tensor]:
        """The oracle's output and gradients, computed in `dtype`; for parameters the terms that `verdict` needs."""
        leaves = spread(self.leaves, dtype)
        sinks = {"sinks": leaves["sinks"].transpose(1, 2)} if "sinks" in leaves else {}
        out = self.attended(leaves | sinks, dropout_mask).out
        grads = torch.autograd.grad(out, list(leaves.values()), self.grad.to(dtype))
        return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}

    def attended(self, leaves: dict[str, Tensor], dropout_mask: Tensor | None = None) -> reference.Attended:
        """The oracle's attention for the leaves, in their dtype."""
        q, k, v = (leaves[name] for name in "qkv")
        norms = (
            norm._replace(gain=leaves.get(f"{x}_gain"), bias=leaves.get(f"{x}_bias"))
            for x, norm in (("q", self.heads.q_norm), ("k", self.heads.k_norm))
        )
        visible = self.visible._replace(sinks=leaves.get("sinks"))
        mask = None if dropout_mask is None else dropout_mask.to(q.dtype)
        return reference.attend(Heads(q, k, v, *norms, self.heads.rotary), visible, self.options, mask)

    def check(self, dropout_mask: Tensor | None = None) -> dict[str, Tensor]:
        """Assert that output and every gradient are within the budget; returns the kernels' results."""
        dtype = self.heads.q.dtype
        exact, eager = self.expected(torch.float64, dropout_mask), self.expected(dtype, dropout_mask)
        got = self.results()
        assert got.keys() == exact.keys()
        for name, value in exact.items():
            assert got[name].shape == (value if name == "out" else self.leaves[name]).shape
            assert got[name].dtype == dtype
            assert_within_budget(got[name], value, eager[name], name)
        return got


def plain_problem(case: Case, dtype: torch.dtype) -> Problem:
    """The case's heads, without norm and RoPE."""
    inputs = draw_inputs(case, dtype)
    q, k, v, grad, sinks, ranges, seed = (
        None if x is None else x.detach().to(DEVICE)
        for x in (inputs.q, inputs.k, inputs.v, inputs.grad, inputs.sinks, inputs.ranges, inputs.seed)
    )
    if ranges is not None:
        ranges = ranges.expand(case.batch, -1, -1).contiguous()
    return Problem(Heads(q, k, v), Visible(ranges, sinks, seed), case.options, grad)


def raw_problem(raw: Raw, case: Case, scale: float | None = None) -> Problem:
    """The norms and rotation, shape and dtype of `raw`, with the attention options of `case`."""
    call = draw(raw)
    case = dataclasses.replace(
        case,
        batch=raw.batch,
        heads=raw.heads[0],
        heads_kv=raw.heads[1],
        queries=raw.length,
        head_dim=raw.head_dim,
    )
    heads, visible, options, grad = plain_problem(case, raw.dtype)
    heads = heads._replace(q=call.q, k=call.k, q_norm=call.q_norm, k_norm=call.k_norm, rotary=call.rotary)
    options = options._replace(scale=scale or options.scale)
    return Problem(heads._replace(v=lay_out(heads.v, raw.layout)), visible, options, grad)


SHRUNK = {
    "forward": Tile(16, 32, 4, 1),
    "query_gradient": Tile(32, 16, 4, 1),
    "key_gradient": Tile(16, 32, 4, 1),
}


def shrink_tiles(monkeypatch: pytest.MonkeyPatch, processors: int = 1, **tiles: Tile) -> None:
    """Give short sequences many tiles, and a GPU of few processors, so that a section has few heads."""
    monkeypatch.setattr(schedule, "gpu", lambda device: schedule.Gpu(processors, 1))
    for table in (HOPPER, SMALL):
        for key, row in table.items():
            monkeypatch.setitem(table, key, row._replace(**(SHRUNK | tiles)))


def use_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give kernels heads as GPUs without a copy engine take them."""
    monkeypatch.setattr(launch, "architecture", lambda device: ARCHITECTURES[8, 0])
