"""Steps of cached generation, with norm, RoPE and attention, against the oracle's full pass."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from hf_qknorm.ops import reference
from hf_qknorm.ops.triton import attention_decode, norm_rope
from hf_qknorm.ops.types import Heads, Norm, Options, Rotary, Visible
from qknorm_tests.error_budget import assert_within_budget
from qknorm_tests.norm_cases import knee_at
from qknorm_tests.random_qkv import make_qkv

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF, BRAIN = torch.float16, torch.bfloat16


class Steps(NamedTuple):
    """Generation from a prompt of 5 tokens, some more at each step; the second batch entry has 3 of left padding."""

    sizes: tuple[int, ...] = (5, 1, 3, 1)
    heads: tuple[int, int] = (4, 1)
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    softcap: float | None = 50.0
    window: int | None = None
    sinks: bool = False
    static: bool = True
    splits: int = 2
    knee: float | None = None
    sharpness: float = 1.0

    def __str__(self) -> str:
        changed = [f"{name}={x}" for name, x in self._asdict().items() if x != self._field_defaults[name]]
        return "-".join(changed).replace("torch.", "") or "plain"

    @property
    def ranges(self) -> Tensor:
        """Which keys each token sees, `[B, T, 2]`; padding sees itself."""
        token = torch.arange(sum(self.sizes))
        start = torch.minimum(torch.tensor([0, 3])[:, None], token)
        if self.window is not None:
            start = torch.maximum(start, token - self.window + 1)
        return torch.stack([start, (token + 1).expand(2, -1)], -1).to(DEVICE, torch.int32)


GENERATIONS = [
    Steps(),
    Steps(dtype=BRAIN, head_dim=80, heads=(2, 2), softcap=None),
    Steps(dtype=HALF, head_dim=128, heads=(7, 1), softcap=100.0, sinks=True),
    Steps(dtype=BRAIN, head_dim=96, window=4),
    Steps(static=False, dtype=BRAIN, heads=(7, 1), sinks=True, window=5),
    Steps(static=False, heads=(3, 3), softcap=None, splits=1),
    Steps(static=False, dtype=HALF, sizes=(5, 3, 3), head_dim=80),
    Steps(dtype=BRAIN, head_dim=64, knee=4.0),
    Steps(dtype=BRAIN, head_dim=64, knee=1.0, sharpness=8),
    Steps(static=False, softcap=None, knee=4.0),
]


class Tokens(NamedTuple):
    """Raw heads of all tokens, angles and norms."""

    q: Tensor
    k: Tensor
    v: Tensor
    norms: tuple[Norm, Norm]
    rotary: Rotary
    sinks: Tensor | None

    @classmethod
    def draw(cls, steps: Steps) -> Tokens:
        length, d = sum(steps.sizes), steps.head_dim
        heads = make_qkv(2, *steps.heads, length, length, d, dtype=steps.dtype)
        q, k, v = (x.detach().to(DEVICE) for x in heads)
        gains = (torch.linspace(0.5, 2.0, d), torch.linspace(1.5, 0.5, d))
        knee = None if steps.knee is None else knee_at(steps.knee, steps.sharpness)
        q_norm, k_norm = (Norm("rms", gain.to(q), knee=knee) for gain in gains)
        angles = (torch.arange(length)[:, None] * 10.0 ** -torch.linspace(0, 3, d // 2))[None]
        rotary = Rotary(angles.cos().to(q), angles.sin().to(q))
        sinks = torch.linspace(-2.0, 2.0, steps.heads[0]).to(q) if steps.sinks else None
        return cls(q, k, v, (q_norm, k_norm), rotary, sinks)

    def at(self, tokens: slice) -> tuple[Tensor, Tensor, Norm, Norm, Rotary]:
        """The arguments of `norm_rope.forward` for some tokens."""
        rotary = Rotary(*(x[:, tokens] for x in self.rotary[:2]))
        return self.q[:, :, tokens], self.k[:, :, tokens], *self.norms, rotary

    def full_pass(self, steps: Steps, dtype: torch.dtype) -> Tensor:
        """The oracle's output for all tokens at once."""
        heads = Heads(*(x.to(dtype) for x in self[:3]), *self.norms, self.rotary)
        visible, options = Visible(steps.ranges, self.sinks), Options(steps.head_dim**-0.5, steps.softcap)
        return reference.attend(heads, visible, options).out


def generate(steps: Steps, tokens: Tokens) -> Tensor:
    """The kernels' output, step by step, with a cache; a static one starts with garbage."""
    room = 64 if steps.static else 0
    keys, values = (torch.full((2, steps.heads[1], room, steps.head_dim), 3e4).to(tokens.q) for _ in range(2))
    outs, done = [], 0
    for size in steps.sizes:
        now = slice(done, done + size)
        made = norm_rope.forward(*tokens.at(now))
        if steps.static:
            keys[:, :, now], values[:, :, now] = made.k, tokens.v[:, :, now]
        else:
            keys, values = torch.cat([keys, made.k], 2), torch.cat([values, tokens.v[:, :, now]], 2)
        visible = Visible(steps.ranges[:, now].contiguous(), tokens.sinks)
        options = Options(steps.head_dim**-0.5, steps.softcap)
        outs.append(attention_decode.forward(made.q, keys, values, visible, options)[0])
        done += size
    return torch.cat(outs, 2)


@pytest.mark.parametrize("steps", GENERATIONS, ids=str)
def test_generation_equals_the_full_pass(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_decode, "splits", lambda q, k: steps.splits)
    tokens = Tokens.draw(steps)
    exact, eager = (tokens.full_pass(steps, dtype) for dtype in (torch.float64, steps.dtype))
    assert_within_budget(generate(steps, tokens), exact, eager)
