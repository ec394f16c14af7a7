"""Arguments that fit their lines, drawn by a seed, and the calls of the operators."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuzz.lines import DTYPES, HEADS, Table, Values
from fuzz.tables import CPP
from hf_qknorm.ops.cpu import build
from hf_qknorm.ops.cpu.norm_rope import KINDS


class Target(NamedTuple):
    """An operator: its table, its arguments for a seed, and its call, which returns its results."""

    name: str
    table: Table
    draw: Callable[[int], Values]
    call: Callable[[Values], list[Tensor]]


class _Draw:
    """Sizes and tensors of one problem."""

    def __init__(self, seed: int) -> None:
        self.random, self.generator = random.Random(str(seed)), torch.Generator().manual_seed(seed)
        self.batch, self.heads_kv = self.random.choice((1, 2, 3)), self.random.choice((1, 2))
        self.heads = self.heads_kv * self.random.choice((1, 2, 3))
        self.queries = self.random.choice((1, 2, 5, 70))
        self.keys = self.queries + self.random.choice((0, 3, 300))
        self.columns = self.random.choice((1, 3, 8, 16, 40, 64))
        self.dtype = self.random.choice(DTYPES[HEADS])

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype or self.dtype)

    def maybe(self, make: Callable[[], Any]) -> Any:
        made = make()
        return made if self.random.random() < 0.6 else None

    def parameter(self, heads: int) -> Tensor:
        shape = self.random.choice(((1,), (self.columns,), (heads, self.columns)))
        return self.normal(*shape, dtype=self.random.choice((self.dtype, torch.float32)))

    def norm(self, side: str, heads: int) -> Values:
        shape = torch.tensor([1.5, self.random.choice((0.0, 2.0)), self.random.choice((1.0, 2.0, 5.5, 8.0))])
        values = {
            "kind": self.random.choice(KINDS[1:]),
            "gain": self.maybe(lambda: self.parameter(heads)),
            "bias": self.maybe(lambda: self.parameter(heads)),
            "eps": 0.5,
            "knee": self.maybe(lambda: shape.to(self.random.choice(DTYPES[HEADS]))),
        }
        return {f"{side}_{name}": x for name, x in values.items()}

    def queries_keys_values(self, keys: int) -> Values:
        """In the layout of projections."""
        count = {"q": (self.heads, self.queries), "k": (self.heads_kv, keys), "v": (self.heads_kv, keys)}
        return {
            name: self.normal(self.batch, rows, heads, self.columns).transpose(1, 2)
            for name, (heads, rows) in count.items()
        }

    def angles(self) -> Values:
        if self.columns < 2 or self.random.random() < 0.3:
            return {"cos": None, "sin": None, "interleaved": False}
        pairs, rows = self.random.choice((1, self.columns // 2)), self.random.choice((1, self.batch))
        angle = self.normal(rows, self.queries, pairs, dtype=torch.float32)
        return {"cos": angle.cos(), "sin": angle.sin(), "interleaved": self.random.random() < 0.5}

    def visible(self, keys: int) -> Values:
        start = torch.arange(self.queries).div(3, rounding_mode="floor").expand(self.batch, -1)
        stop = (torch.arange(self.queries) + 1 + keys - self.queries).expand(self.batch, -1)
        rate = self.maybe(lambda: 0.25)
        return {
            "ranges": self.maybe(lambda: torch.stack([start, stop], -1).to(torch.int32)),
            "sinks": self.maybe(lambda: self.normal(self.heads)),
            "seed": torch.tensor([7]) if rate else self.maybe(lambda: torch.tensor([7])),
            "scale": 0.3,
            "causal": self.random.random() < 0.5,
            "window": self.maybe(lambda: 4),
            "dropout": rate or 0.0,
        }


def _attention(seed: int) -> Values:
    draw = _Draw(seed)
    visible = draw.visible(draw.keys)
    cap, gradients = draw.maybe(lambda: 5.0), draw.random.random() < 0.5
    return draw.queries_keys_values(draw.keys) | visible | {"cap": cap, "gradients": gradients}


def _backward(seed: int) -> Values:
    values = _attention(seed) | {"gradients": True}
    q = values["q"]
    out, normaliser = _call("forward", values)
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(seed)).to(q.dtype)
    return values | {"grad": grad, "out": out, "normaliser": normaliser, "parts": 2}


def _norm_rope(seed: int) -> Values:
    draw = _Draw(seed)
    heads = draw.queries_keys_values(draw.queries)
    q, k = heads["q"], draw.maybe(lambda: heads["k"])
    return {"q": q, "k": k, **draw.norm("q", draw.heads), **draw.norm("k", draw.heads_kv), **draw.angles()}


def _norm_rope_backward(seed: int) -> Values:
    values = _norm_rope(seed)
    return values | {f"d{side}": None if values[side] is None else torch.ones_like(values[side]) for side in "qk"}


def _call(name: str, values: Values) -> list[Tensor]:
    overload = build.overload(name)
    found = overload(*(values.get(x.name, 0.5) for x in overload._schema.arguments))  # measure's threshold
    return [found] if isinstance(found, Tensor) else [x for x in found if x is not None]


DRAWS = {"backward": _backward, "norm_rope": _norm_rope, "norm_rope_backward": _norm_rope_backward}


def targets() -> list[Target]:
    """The operators of the C++ library."""
    return [
        Target(name, table, DRAWS.get(name, _attention), lambda values, name=name: _call(name, values))
        for name, table in CPP.items()
    ]
