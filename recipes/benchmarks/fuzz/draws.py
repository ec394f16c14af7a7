"""Arguments that fit their lines, drawn by a seed, and the calls of the operators."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuzz.lines import Table, Values
from fuzz.tables import CPP, TRITON
from hf_qknorm.ops import operators
from hf_qknorm.ops.cpu import build
from hf_qknorm.ops.norms import NORMS
from hf_qknorm.ops.registration import Operator

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Target(NamedTuple):
    """An operator: its table, its arguments for a seed, and its call, which returns all tensors that it writes."""

    name: str
    table: Table
    draw: Callable[[int], Values]
    call: Callable[[Values], list[Tensor]]


SHARPNESSES = (1.0, 2.0, 5.5, 8.0)


class _Draw:
    """Sizes and tensors of one problem."""

    def __init__(self, seed: int, *, fused: bool) -> None:
        self.random, self.generator = random.Random(str(seed)), torch.Generator().manual_seed(seed)
        self.batch, self.heads_kv = self.random.choice((1, 2, 3)), self.random.choice((1, 2))
        self.heads = self.heads_kv * self.random.choice((1, 2, 3))
        self.queries = self.random.choice((1, 2, 5, 19) if fused else (1, 2, 5, 70))
        self.keys = self.queries + self.random.choice((0, 3) if fused else (0, 3, 300))
        self.columns = self.random.choice((16, 40, 64) if fused else (1, 3, 8, 16, 40, 64))
        self.dtype = self.random.choice(DTYPES)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype or self.dtype)

    def maybe(self, make: Callable[[], Any]) -> Any:
        made = make()
        return made if self.random.random() < 0.6 else None

    def parameter(self, heads: int) -> Tensor:
        shape = self.random.choice(((1,), (self.columns,), (heads, self.columns)))
        return self.normal(*shape, dtype=self.random.choice((self.dtype, torch.float32)))

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

    def norm(self, side: str, heads: int) -> Values:
        kind = self.random.choice((*NORMS, "none"))
        gain, bias = (self.maybe(lambda: self.parameter(heads)) for _ in range(2))
        values = {"kind": kind, "gain": gain, "bias": bias, "eps": 1e-6, "p": 3.0}
        values["knee"] = self.maybe(lambda: torch.tensor([20.0, 19.0, self.random.choice(SHARPNESSES)]))
        return {f"{side}_{name}": x for name, x in values.items()}

    def norms(self) -> Values:
        return self.norm("q", self.heads) | self.norm("k", self.heads_kv) | self.angles()


def _cpp_attention(seed: int) -> Values:
    draw = _Draw(seed, fused=False)
    visible = draw.visible(draw.keys)
    return draw.queries_keys_values(draw.keys) | visible | {"cap": draw.maybe(lambda: 5.0)}


def _cpp_backward(seed: int) -> Values:
    values = _cpp_attention(seed)
    q, k = values["q"], values["k"]
    out, normaliser = _cpp_call("forward", values)
    return values | {
        "grad": torch.randn(q.shape, generator=torch.Generator().manual_seed(seed)).to(q.dtype),
        "out": out,
        "normaliser": normaliser,
        "dq": torch.zeros(2, *q.shape),
        **{"dk": torch.zeros_like(k), "dv": torch.zeros_like(k), "delta": torch.zeros(q.shape[:3])},
    }


def _cpp_norm_rope(seed: int) -> Values:
    draw = _Draw(seed, fused=False)
    x = draw.normal(draw.batch, draw.queries, draw.heads, draw.columns).transpose(1, 2)
    gain, bias = (draw.maybe(lambda: draw.parameter(draw.heads)) for _ in range(2))
    shape = {"eps": 0.5, "sharpness": draw.random.choice(SHARPNESSES), "length": 0.7}
    centred = draw.random.random() < 0.5
    return {"x": x, "normed": True, "centred": centred, "gain": gain, "bias": bias, **shape, **draw.angles()}


def _cpp_norm_rope_backward(seed: int) -> Values:
    values = _cpp_norm_rope(seed)
    return values | {"grad": torch.ones_like(values["x"])}


def _cpp_call(name: str, values: Values) -> list[Tensor]:
    overload = build.overload(name)
    found = overload(*(values.get(x.name, 0.5) for x in overload._schema.arguments))  # measure's threshold
    returned = [found] if isinstance(found, Tensor) else [*(found or ())]
    return returned + [values[x.name] for x in overload._schema.arguments if x.alias_info is not None]


def _fused(seed: int) -> Values:
    draw = _Draw(seed, fused=True)
    norms = draw.norms() if draw.random.random() < 0.7 else _plain_norms()
    raw = norms["cos"] is not None or norms["q_kind"] != "none" or norms["k_kind"] != "none"
    keys = draw.queries if raw else draw.keys
    options = {"mask": None, "softcap": draw.maybe(lambda: 5.0), "statistics": False}
    return draw.queries_keys_values(keys) | norms | draw.visible(keys) | options


def _plain_norms() -> Values:
    norm = {"kind": "none", "gain": None, "bias": None, "eps": 1e-6, "p": 2.0, "knee": None}
    angles = {"cos": None, "sin": None, "interleaved": False}
    return {f"{side}_{name}": x for side in "qk" for name, x in norm.items()} | angles


def _fused_backward(seed: int) -> Values:
    values = _fused(seed)
    with torch.no_grad():
        out, normaliser, *_ = _run(operators.FUSED_ATTENTION, values)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.dtype)
    return values | {"grad": grad, "out": out, "normaliser": normaliser}


def _norm_rope(seed: int) -> Values:
    draw = _Draw(seed, fused=True)
    heads = draw.queries_keys_values(draw.queries)
    return {"q": heads["q"], "k": heads["k"]} | draw.norms()


def _norm_rope_backward(seed: int) -> Values:
    values = _norm_rope(seed)
    return values | {"dq": torch.ones_like(values["q"]), "dk": torch.ones_like(values["k"])}


def _run(operator: Operator, values: Values) -> Any:
    return operator(*(values[name] for name in operator.fields))


def _fused_call(name: str, values: Values) -> list[Tensor]:
    with torch.no_grad():
        return [*_run(FUSED[name], values)]


FUSED = {
    "fused_attention": operators.FUSED_ATTENTION,
    "fused_attention_backward": operators.FUSED_ATTENTION_BACKWARD,
    "norm_rope": operators.NORM_ROPE_HEADS,
    "norm_rope_backward": operators.NORM_ROPE_BACKWARD,
}
DRAWS = {
    "cpp": {
        "backward": _cpp_backward, "norm_rope": _cpp_norm_rope, "norm_rope_backward": _cpp_norm_rope_backward,
    },
    "triton": {
        "fused_attention": _fused, "fused_attention_backward": _fused_backward, "norm_rope": _norm_rope,
        "norm_rope_backward": _norm_rope_backward,
    },
}  # fmt: skip


def targets(kind: str) -> list[Target]:
    """The operators of the C++ library ("cpp") or of Triton's kernels ("triton")."""
    tables, call = (CPP, _cpp_call) if kind == "cpp" else (TRITON, _fused_call)
    return [
        Target(name, table, DRAWS[kind].get(name, _cpp_attention), lambda values, name=name: call(name, values))
        for name, table in tables.items()
    ]
