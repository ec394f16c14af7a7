"""The fused operators: torch's requirements, and the errors for wrong arguments."""

from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor
from torch.library import opcheck

from hf_qknorm.ops import library, operators
from hf_qknorm.ops.registration import pack, pack_norms
from hf_qknorm.ops.types import Heads, Norm, Options, Rotary, Visible
from qknorm_tests.norm_cases import knee_at
from qknorm_tests.operator_calls import call

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
B, H, HK, T, D = 2, 4, 2, 9, 16


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE).requires_grad_()


def heads(length: int = T) -> list[Tensor]:
    """q, k, v in the layout of projections."""
    return [draw(B, length, n, D, seed=i).detach().transpose(1, 2).requires_grad_() for i, n in enumerate((H, HK, HK))]


def parts(length: int = T, knee: float = 0.0) -> dict[str, Any]:
    """Norms with gains and a bias, with or without a knee, and a rotation."""
    angles = draw(1, length, D // 2, seed=3).detach()
    shape = knee_at(knee, 4.0) if knee else None
    k_norm = Norm("layer", draw(HK, D, seed=4), draw(HK, D, seed=5), knee=shape)
    q_norm = Norm("rms", draw(D, seed=6), knee=shape)
    return {"q_norm": q_norm, "k_norm": k_norm, "rotary": Rotary(angles.cos(), angles.sin())}


def wanted(parts: dict, *tensors: Tensor) -> list[Tensor]:
    return [*tensors, parts["q_norm"].gain, parts["k_norm"].gain, parts["k_norm"].bias]


CHECKED = ("test_schema", "test_faketensor")  # `differentiable` has the gradients
OPTIONS = {
    "capped": Options(0.25, 5.0, causal=True),
    "window": Options(0.25, 50.0, causal=True, window=4),
    "dropout": Options(0.25, causal=True, dropout=0.2),
}


@pytest.mark.costly
@pytest.mark.parametrize(("name", "knee"), [("dropout", 0.0), ("capped", 4.0), ("window", 0.0)])
def test_fused_attention_passes_torchs_opcheck(name: str, knee: float) -> None:
    seed = torch.tensor([3], device=DEVICE) if name == "dropout" else None
    sinks = draw(H) if name == "window" else None
    values = pack(Heads(*heads(), **parts(knee=knee)), Visible(None, sinks, seed), OPTIONS[name])
    values = (*(x.detach() if isinstance(x, Tensor) else x for x in values), name == "window")
    opcheck(operators.FUSED_ATTENTION.overload, values, test_utils=CHECKED)
    out, normaliser, *_ = operators.FUSED_ATTENTION(*values)
    opcheck(operators.FUSED_ATTENTION_BACKWARD.overload, (out, out, normaliser, *values), test_utils=CHECKED)


def test_norm_rope_passes_torchs_opcheck() -> None:
    q, k, _ = heads()
    packed = [x.detach() if isinstance(x, Tensor) else x for x in (q, k, *pack_norms(*parts(knee=4.0).values()))]
    opcheck(operators.NORM_ROPE_HEADS.overload, packed, test_utils=CHECKED)
    opcheck(operators.NORM_ROPE_BACKWARD.overload, (q.detach(), k.detach(), *packed), test_utils=CHECKED)


def test_an_exported_program_holds_the_operator() -> None:
    class Attention(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return library.fused_attention(*call(q, k, v, q_norm=Norm("rms"), softcap=5.0, causal=True))

    tensors = [x.detach() for x in heads()]
    program = torch.export.export(Attention(), tuple(tensors))
    assert "hf_qknorm.fused_attention.default" in str(program.graph)
    assert torch.equal(program.module()(*tensors), Attention()(*tensors))


def test_saved_memory_is_linear_in_length() -> None:
    """Backward keeps raw q, k, v, which are views of projections' outputs, the output, and two numbers a row."""
    tensors, fused = heads(100), parts(100)
    kept: list[Tensor] = []
    given = {x.data_ptr() for x in (*wanted(fused, *tensors), *fused["rotary"][:2])}

    def pack(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = library.fused_attention(*call(*tensors, causal=True, **fused))
    own = [list(x.shape) for x in kept if x.data_ptr() not in given]
    assert sorted(own) == [[B, H, 100, 2], [B, H, 100, D]]
    assert out.shape == (B, H, 100, D)


@pytest.mark.parametrize("queries", [1, T])
def test_ranges_past_the_last_key_end_there(queries: int) -> None:
    """As those of a mask for a longer cache."""
    most, results = torch.iinfo(torch.int32).max, []
    stops = torch.tensor([3, 5, T + 1, T + 40, *[most] * (T - 4)])[T - queries :]
    for limit in (T, most):
        q, k, v = heads()
        ranges = torch.stack([torch.zeros_like(stops), stops.clamp_max(limit)], -1)[None].to(DEVICE, torch.int32)
        out = library.fused_attention(*call(q[:, :, T - queries :], k, v, ranges=ranges, softcap=5.0))
        results.append([out, *torch.autograd.grad(out.sin().sum(), [q, k, v])])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.skipif(DEVICE == "cuda", reason="there the kernels run")
def test_the_reason_without_a_gpu_or_an_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert library.why_not_fused(Heads(*heads())) == "the kernels are for NVIDIA GPUs, and the tensors are on cpu"
