"""Problems for norm and RoPE, and the oracle's results for them."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hf_qknorm.norms import NORMS
from hf_qknorm.ops import reference
from hf_qknorm.ops.types import Heads, Norm, Rotary

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF, BRAIN, EPS = torch.float16, torch.bfloat16, 1e-6


class Case(NamedTuple):
    """One call; `gains` and `biases` are for q and k; `rotary` is the number of rotated columns and the style.

    With a knee, the lengths of rows differ by orders of magnitude, and the norms keep the mean one unless not `held`.
    """

    norms: tuple[str, str] = ("rms", "rms")
    head_dim: int = 16
    length: int = 63
    dtype: torch.dtype = torch.float32
    gains: tuple[str, str] = ("shared", "shared")
    biases: tuple[str, str] = ("none", "none")
    rotary: tuple[int, str] = (16, "half")
    batch: int = 1
    heads: tuple[int, int] = (2, 1)
    angles: str = "one"  # batch of cos and sin
    layout: str = "tokens"
    spread: float = 1.0
    p: float = 3.0
    knee: float | None = None
    sharpness: float = 1.0
    held: bool = True

    def __str__(self) -> str:
        changed = [value for name, value in self._asdict().items() if value != self._field_defaults[name]]
        return "-".join(str(value).replace("torch.", "") for value in changed) or "plain"


CASES = [
    Case(),
    Case(norms=("layer", "l2"), head_dim=40, length=111, dtype=BRAIN, rotary=(40, "interleaved"), layout="gaps"),
    Case(norms=("l2", "lp"), head_dim=64, length=1, batch=2, gains=("per_head", "none"), rotary=(20, "half")),
    Case(norms=("lp", "layer"), head_dim=64, dtype=HALF, gains=("per_head", "scalar"), heads=(4, 2)),
    Case(norms=("none", "rms"), head_dim=80, dtype=BRAIN, rotary=(80, "half"), gains=("none", "per_head"), length=34),
    Case(norms=("rms", "none"), head_dim=96, dtype=HALF, rotary=(96, "interleaved"), layout="heads", length=21),
    Case(norms=("none", "none"), head_dim=112, dtype=BRAIN, rotary=(56, "interleaved"), layout="sparse", length=21),
    Case(norms=("layer", "layer"), head_dim=128, dtype=BRAIN, biases=("shared", "per_head"), rotary=(128, "half")),
    Case(norms=("rms", "l2"), head_dim=256, length=19, dtype=BRAIN, rotary=(64, "half"), gains=("per_head", "shared")),
    Case(norms=("lp", "lp"), head_dim=128, length=37, rotary=(0, "none"), gains=("shared", "none"), p=1.5),
    Case(norms=("l2", "lp"), dtype=HALF, rotary=(0, "none"), gains=("scalar", "scalar"), biases=("scalar", "none")),
    Case(norms=("lp", "rms"), dtype=BRAIN, p=1.0, length=150, batch=2, angles="all", rotary=(8, "half")),
    Case(norms=("layer", "rms"), biases=("per_head", "shared"), rotary=(16, "interleaved"), layout="heads"),
    Case(norms=("rms", "lp"), dtype=HALF, biases=("shared", "scalar"), heads=(7, 1), rotary=(4, "half")),
    Case(norms=("l2", "l2"), head_dim=64, dtype=BRAIN, batch=3, heads=(3, 3), angles="all", layout="gaps", length=33),
    Case(norms=("lp", "lp"), spread=1e15, gains=("none", "none"), p=4.0),
    Case(norms=("lp", "l2"), spread=1e-12, gains=("none", "none")),
    Case(norms=("rms", "layer"), spread=1e16),
    Case(norms=("none", "layer"), head_dim=100, length=21, gains=("shared", "none"), rotary=(50, "half")),
]
DOMINANT = 1e6  # a knee that turns the norm into a constant factor
KNEES = [
    Case(knee=4.0),
    Case(knee=4.0, held=False),
    Case(norms=("l2", "lp"), dtype=BRAIN, knee=2.0, held=False),
    Case(norms=("layer", "rms"), head_dim=64, dtype=BRAIN, gains=("per_head", "shared"), rotary=(64, "half"), knee=4.0),
    Case(norms=("l2", "lp"), head_dim=40, dtype=HALF, gains=("scalar", "per_head"), rotary=(20, "half"), knee=0.5),
    Case(norms=("lp", "layer"), dtype=BRAIN, p=1.0, biases=("shared", "per_head"), heads=(4, 2), batch=2, knee=4.0),
    Case(norms=("lp", "l2"), p=1.5, gains=("shared", "none"), rotary=(16, "interleaved"), layout="gaps", knee=8.0),
    Case(norms=("rms", "none"), head_dim=128, length=19, dtype=HALF, rotary=(128, "half"), knee=32.0),
    Case(norms=("rms", "layer"), dtype=BRAIN, rotary=(8, "half"), layout="sparse", knee=DOMINANT),
    Case(norms=("l2", "lp"), gains=("scalar", "none"), rotary=(0, "none"), knee=DOMINANT),
    Case(norms=("lp", "rms"), dtype=HALF, p=4.0, knee=DOMINANT),
    Case(norms=("lp", "lp"), spread=1e15, gains=("none", "none"), p=4.0, knee=4.0),
    Case(norms=("l2", "rms"), spread=1e-12, gains=("none", "none"), knee=4.0),
    Case(norms=("layer", "lp"), spread=1e-3, gains=("none", "shared"), knee=1e-6),
]
SHARP = [  # rows on both sides of the knee
    Case(knee=1.0, sharpness=8),
    Case(norms=("layer", "rms"), head_dim=64, dtype=BRAIN, rotary=(64, "half"), knee=2.0, sharpness=4),
    Case(norms=("l2", "layer"), head_dim=40, dtype=HALF, gains=("scalar", "per_head"), knee=0.5, sharpness=8),
    Case(norms=("lp", "l2"), p=1.5, rotary=(16, "interleaved"), layout="gaps", knee=1.0, sharpness=2.5),
    Case(norms=("rms", "lp"), p=4.0, dtype=BRAIN, biases=("shared", "per_head"), knee=1.0, sharpness=8),
    Case(norms=("lp", "lp"), spread=1e15, gains=("none", "none"), p=4.0, knee=1.0, sharpness=8),
    Case(norms=("l2", "rms"), spread=1e-12, gains=("none", "none"), knee=4.0, sharpness=8),
    Case(norms=("layer", "l2"), spread=1e16, knee=1.0, sharpness=6),
    Case(norms=("layer", "lp"), spread=1e-3, gains=("none", "shared"), knee=1e-6, sharpness=4),
    Case(norms=("rms", "layer"), dtype=BRAIN, rotary=(8, "half"), layout="sparse", knee=DOMINANT, sharpness=8),
]
CASES += KNEES + SHARP


def knee_at(knee: float, sharpness: float = 1.0) -> Tensor:
    """A norm's shape with this ε, for inputs of mean square 1."""
    return torch.tensor([math.log2(knee / EPS), math.log2(1 / EPS), sharpness], device=DEVICE)


def parameters(q_norm: Norm, k_norm: Norm) -> dict[str, Tensor]:
    """Gains and biases, by name, of the norms that are there."""
    norms = [(side, norm) for side, norm in (("q", q_norm), ("k", k_norm)) if norm.kind != "none"]
    named = {f"{side}_{part}": getattr(norm, part) for side, norm in norms for part in ("gain", "bias")}
    return {name: value for name, value in named.items() if value is not None}


def with_parameters(heads: Heads, leaves: dict[str, Tensor]) -> Heads:
    """The heads with these tensors in place of their own."""
    q_norm, k_norm = (
        norm._replace(gain=leaves.get(f"{side}_gain"), bias=leaves.get(f"{side}_bias"))
        for side, norm in (("q", heads.q_norm), ("k", heads.k_norm))
    )
    return Heads(leaves["q"], leaves["k"], leaves.get("v", heads.v), q_norm, k_norm, heads.rotary)


def lay_out(x: Tensor, layout: str) -> Tensor:
    """x `[B, H, T, D]` with other strides, and NaN between its entries."""
    batch, heads, length, head_dim = x.shape
    if layout == "heads":
        return x.contiguous()
    if layout == "tokens":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    room = torch.full((batch, length + 2, heads + 1, 2 * head_dim), float("nan"), dtype=x.dtype, device=x.device)
    view = (room[..., ::2] if layout == "sparse" else room[..., :head_dim])[:, 1:-1, 1:].transpose(1, 2)
    return view.copy_(x)


def draw(case: Case) -> Heads:
    """Queries, keys, and as values the keys again."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def values(kind: str, heads: int, mean: float) -> Tensor | None:
        shape = {"shared": (case.head_dim,), "per_head": (heads, case.head_dim), "scalar": (1,), "none": None}[kind]
        return None if shape is None else (normal(*shape) / 2 + mean).to(DEVICE, case.dtype)

    def norm(kind: str, gain: str, bias: str, heads: int) -> Norm:
        gains, biases = values(gain, heads, 1.0), values(bias, heads, 0.0)
        if case.knee is None:
            return Norm(kind, gains, biases, p=case.p)
        order = 2.0 if kind == "none" else NORMS[kind].order(case.p)
        power = float(normal(1000).abs().pow(order).mean()) ** (2 / order) * case.spread**2
        a, b = (math.log2(x / EPS) for x in (power * case.knee ** (2 / order), power))
        knee = torch.tensor([a, b if case.held else 0.0, case.sharpness], device=DEVICE)
        return Norm(kind, gains, biases, EPS, case.p, knee)

    heads = [normal(case.batch, count, case.length, case.head_dim) * case.spread for count in case.heads]
    if case.knee is not None:
        heads = [x * normal(*x.shape[:3], 1).exp() for x in heads]
    for x in heads:
        x[:, :, case.length // 2 :: 7] = 0.0  # rows of padding
    q, k = (lay_out(x.to(DEVICE, case.dtype), case.layout) for x in heads)
    norms = [norm(*parts) for parts in zip(case.norms, case.gains, case.biases, case.heads, strict=True)]
    width, style = case.rotary
    rotary = None
    if width:
        angle = normal(case.batch if case.angles == "all" else 1, case.length, width // 2)
        cos, sin = (
            f(angle).to(DEVICE, torch.float32 if case.batch > 1 else case.dtype) for f in (torch.cos, torch.sin)
        )
        if style == "half":  # as in models: twice as wide
            cos, sin = (torch.cat([x, x], -1)[..., : width // 2] for x in (cos, sin))
        else:
            cos, sin = (x.repeat_interleave(2, -1)[..., ::2] for x in (cos, sin))
        rotary = Rotary(cos, sin, style == "interleaved")
    return Heads(q, k, k, *norms, rotary)


def spread(leaves: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Leaves in `dtype`, parameters expanded to all rows and heads, so that their gradients are terms of sums."""
    made = {}
    for name, x in leaves.items():
        if name in ("q", "k", "v"):
            made[name] = x.detach().to(dtype).requires_grad_()
        else:
            batch, heads, length, head_dim = leaves["k" if name.startswith("k_") else "q"].shape
            shape = (batch, length, heads) if name == "sinks" else (batch, length, heads, head_dim)
            made[name] = x.detach().to(torch.promote_types(dtype, torch.float32)).expand(shape).requires_grad_()
    return made


def leaves_of(heads: Heads) -> dict[str, Tensor]:
    """The tensors with a gradient, without values."""
    return {"q": heads.q, "k": heads.k, **parameters(heads.q_norm, heads.k_norm)}


def expected(heads: Heads, dq: Tensor, dk: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """q̂, k̂ and every gradient by autograd, computed in `dtype`; for gains and biases the terms that `verdict` needs."""
    leaves = spread(leaves_of(heads), dtype)
    q, k = reference.norm_rope(with_parameters(heads._replace(v=leaves["k"]), leaves))
    grads = torch.autograd.grad([q, k], list(leaves.values()), [dq.to(dtype), dk.to(dtype)])
    return {"q̂": q.detach(), "k̂": k.detach(), **dict(zip(leaves, grads, strict=True))}
