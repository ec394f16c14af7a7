"""The operators under torch's checks and transforms; their memory, layouts and random numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from hf_qknorm.ops import library, operators, tiled
from hf_qknorm.ops.cpu import attention as cpu
from hf_qknorm.ops.cpu import build, norm_rope
from hf_qknorm.ops.registration import pack, pack_norms
from hf_qknorm.ops.types import Call, Heads, Norm, Rotary
from qknorm_tests.attention_cases import CPP, DEVICE, TRITON, Case, Implementation, draw_ranges, problem
from qknorm_tests.covering import covering
from qknorm_tests.memory import LargestStorage
from qknorm_tests.norm_cases import knee_at
from qknorm_tests.operator_calls import call
from qknorm_tests.random_qkv import make_qkv

every = pytest.mark.parametrize("implementation", ["tiled", "cpp", "triton"], indirect=True)
CHECKED = ("test_schema", "test_faketensor")  # `differentiable` has the gradients
CASES = {
    "capped": Case(batch=1, queries=9, causal=True, softcap=5.0),
    "window": Case(batch=1, queries=9, window=2, sinks=True),
    "ranges": Case(queries=9, ranges="window"),
    "dropout": Case(batch=1, queries=9, dropout=0.25, softcap=5.0),
    "mask": Case(queries=9, softcap=5.0, mask="bool:B1TS"),
    "additive": Case(queries=9, mask="add:B1TS"),
}


def attend_to(implementation: Implementation) -> Callable[..., Tensor]:
    """A function of loose arguments, as `operator_calls.call`."""
    return lambda *args, **options: implementation.attend(Call(*call(*args, **options)))


def heads(*sizes: int, device: Any = "cpu", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v of `make_qkv`, as projections lay them out."""
    made = (x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in make_qkv(*sizes, dtype=dtype))
    return [x.to(device).requires_grad_() for x in made]


def normed(knee: float = 0.0) -> dict[str, Any]:
    """Norms with gains and a bias, with or without a knee, and a rotation, for 4 and 2 heads of 9 tokens."""
    generator, shape = torch.Generator().manual_seed(0), knee_at(knee, 4.0) if knee else None
    gain, k_gain, bias, angle = (
        torch.randn(x, generator=generator).to(DEVICE) for x in ((16,), (2, 16), (2, 16), (1, 9, 8))
    )
    norms = {"q_norm": Norm("rms", gain, knee=shape), "k_norm": Norm("layer", k_gain, bias, knee=shape)}
    return {**norms, "rotary": Rotary(angle.cos(), angle.sin())}


@every
@pytest.mark.parametrize("name", CASES)
def test_attention_passes_torchs_opcheck(implementation: Implementation, name: str) -> None:
    given = problem(CASES[name], torch.bfloat16 if name == "window" else torch.float32, implementation.device)
    if implementation.name == "tiled":
        values = (*given.heads[:3], *given.visible, *given.options)
        opcheck(tiled.ATTENTION.overload, values, test_utils=CHECKED)
        opcheck(tiled.ATTENTION_BACKWARD.overload, (given.grad, *values), test_utils=CHECKED)
    elif given.visible.mask is None and implementation.name == "cpp":
        for gradients in (False, True):
            values = (*given.heads[:3], *given.visible[:3], *given.options, gradients)
            opcheck(build.overload("forward"), values, test_utils=CHECKED)
    elif given.visible.mask is None and name != "ranges":
        of = Heads(*given.heads[:3], *(normed(4.0 if name == "capped" else 0.0) if name != "window" else {}).values())
        values = (*pack(of, given.visible, given.options), name == "window")
        opcheck(operators.FUSED_ATTENTION.overload, values, test_utils=CHECKED)
        out, normaliser, *_ = operators.FUSED_ATTENTION(*values)
        opcheck(operators.FUSED_ATTENTION_BACKWARD.overload, (out, out, normaliser, *values), test_utils=CHECKED)


def test_norms_pass_torchs_opcheck(compiled: None) -> None:
    x, angles = torch.randn(1, 4, 5, 16), torch.ones(1, 5, 8)
    norm = Norm("rms", torch.ones(16), knee=torch.tensor([1.0, 2.0, 8.0]))
    values = (x, x[:, :2], *pack_norms(norm, norm, Rotary(angles, angles)))
    assert [argument.name for argument in build.overload("norm_rope")._schema.arguments] == [*norm_rope.FIELDS]
    opcheck(build.overload("norm_rope"), values, test_utils="test_schema")
    pytest.importorskip("triton")
    q, k, _ = (x.detach() for x in heads(2, 4, 2, 9, 9, 16, device=DEVICE))
    packed = [q, k, *pack_norms(*normed(4.0).values())]
    opcheck(operators.NORM_ROPE_HEADS.overload, packed, test_utils=CHECKED)
    opcheck(operators.NORM_ROPE_BACKWARD.overload, (q, k, *packed), test_utils=CHECKED)


@every
@pytest.mark.parametrize("queries", [9, 1])
def test_layouts(implementation: Implementation, queries: int) -> None:
    """The output is laid out for the output projection; the strides of heads, sinks and ranges change no bit."""
    attend, device = attend_to(implementation), implementation.device
    q, k, v = (x.detach() for x in heads(2, 4, 2, queries, 9, 16, device=device))
    sinks, ranges = torch.arange(4.0, device=device), draw_ranges("left_padding", 2, queries, 9).to(device)
    out = attend(q, k, v, softcap=5.0, sinks=sinks, ranges=ranges)
    assert out.transpose(1, 2).is_contiguous()
    gaps = [torch.stack([x, x], -1)[..., 0] for x in (q, k, v, sinks)]
    for others in ([x.contiguous() for x in (q, k, v, sinks)], gaps):
        other = attend(*others[:3], softcap=5.0, sinks=others[3], ranges=ranges.mT.contiguous().mT)
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if implementation.name == "tiled" else {"rtol": 0.0, "atol": 0.0}
        torch.testing.assert_close(out, other, **tolerance)  # a BLAS has an order for each layout


@every
def test_the_same_generator_state_drops_the_same(implementation: Implementation) -> None:
    q, k, v = (x.detach() for x in heads(1, 2, 2, 40, 40, 16, device=implementation.device))

    def attend(seed: int | None) -> Tensor:
        if seed is not None:
            torch.manual_seed(seed)
        return attend_to(implementation)(q, k, v, causal=True, dropout=0.5)

    first, second = attend(1), attend(None)
    assert torch.equal(attend(1), first)
    assert not torch.equal(first, second)
    assert not torch.equal(attend(2), first)


@pytest.mark.parametrize(
    ("implementation", "dropout", "use_reentrant"),
    covering(["tiled", "cpp", "triton"], [0.0, 0.3], [False, True], strength=1),
    indirect=["implementation"],
)
def test_gradient_checkpointing_gives_the_same_gradients(
    implementation: Implementation, dropout: float, use_reentrant: bool
) -> None:
    leaves, found = heads(2, 2, 1, 20, 20, 16, device=implementation.device), []

    def attend(*leaves: Tensor) -> Tensor:
        return attend_to(implementation)(*leaves, softcap=5.0, causal=True, dropout=dropout).sin()

    for again in (False, True):
        torch.manual_seed(7)
        out = checkpoint(attend, *leaves, use_reentrant=use_reentrant) if again else attend(*leaves)
        torch.rand(3)  # other code advances the generator in between
        for x in leaves:
            x.grad = None
        out.sum().backward()
        found.append([x.grad for x in leaves])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("threads", [1, 3])
def test_each_run_in_cpp_gives_the_same_bits(threads: int, compiled: None) -> None:
    """With few heads, threads share the keys of a head."""
    case = Case(batch=1, heads=2, queries=1030, head_dim=4, causal=True, softcap=5.0)
    given, before = problem(case, torch.float32), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got, *runs = given.check(CPP), *(given.results(cpu.attention) for _ in range(2))
        assert cpu._key_parts(*given.heads[:2]) == (1 if threads == 1 else 2)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(run[name], result) for run in runs for name, result in got.items())


def largest(attend: Callable[..., Tensor], leaves: list[Tensor], **options: Any) -> int:
    """The elements of the largest tensor in forward, backward and statistics."""
    with LargestStorage() as found:
        attend(*leaves, **options).sum().backward()
        with torch.no_grad():
            attend(leaves[0][:, :, -1:], *leaves[1:], softcap=options.get("softcap"))
        tiled.head_statistics(*call(*leaves, **options))
    return found.elements


@pytest.mark.parametrize("ranges", [None, "shared", "packed"])
@pytest.mark.parametrize("implementation", ["tiled"], indirect=True)
def test_the_largest_temporary_is_linear_in_the_length(implementation: Implementation, ranges: str | None) -> None:
    sizes = []
    for n in (256, 512, 1024):
        seen = None if ranges is None else draw_ranges(ranges, 1, n, n)
        leaves = heads(1, 4, 2, n, n, 16)
        sizes.append(largest(attend_to(implementation), leaves, softcap=50.0, causal=ranges is None, ranges=seen))
    assert sizes[1] <= 2 * sizes[0]
    assert sizes[2] <= 4 * sizes[0]


@pytest.mark.parametrize("implementation", ["tiled", "cpp"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_and_values_are_not_repeated_for_their_group(implementation: Implementation, dtype: torch.dtype) -> None:
    """With few queries, the keys themselves are the largest tensor; repeated they would be 8 times that."""
    for softcap in (None, 50.0):
        leaves = heads(1, 8, 1, 4, 2048, 64, dtype=dtype)
        assert largest(attend_to(implementation), leaves, softcap=softcap) == leaves[1].numel()


def test_saved_memory_of_the_kernels_is_linear_in_length() -> None:
    """Backward keeps raw q, k, v, which are views of projections' outputs, the output, and two numbers a row."""
    pytest.importorskip("triton")
    leaves, of, kept = heads(2, 4, 2, 9, 9, 16, device=DEVICE), normed(), []
    given = {x.data_ptr() for x in (*leaves, of["q_norm"].gain, *of["k_norm"][1:3], *of["rotary"][:2])}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        attend_to(TRITON)(*leaves, causal=True, **of)
    assert sorted(list(x.shape) for x in kept if x.data_ptr() not in given) == [[2, 4, 9, 2], [2, 4, 9, 16]]


def test_an_exported_program_holds_the_operator() -> None:
    pytest.importorskip("triton")

    class Attention(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return library.fused_attention(*call(q, k, v, q_norm=Norm("rms"), softcap=5.0, causal=True))

    tensors = [x.detach() for x in heads(2, 4, 2, 9, 9, 16, device=DEVICE)]
    program = torch.export.export(Attention(), tuple(tensors))
    assert "hf_qknorm.fused_attention.default" in str(program.graph)
    assert torch.equal(program.module()(*tensors), Attention()(*tensors))


@every
def test_derivatives_that_do_not_exist_are_refused(implementation: Implementation) -> None:
    """Of second order, in forward mode, whose tangent would be taken as zero, and of functorch."""
    attend, (q, k, v) = attend_to(implementation), heads(1, 4, 2, 5, 5, 8, device=implementation.device)
    (grad,) = torch.autograd.grad(attend(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="marked with @once_differentiable"):
        grad.sum().backward()
    sinks = torch.zeros(4, device=implementation.device)
    of: dict[str, Tensor] = {"q": q.detach(), "k": k.detach(), "v": v.detach(), "sinks": sinks}
    for name, x in of.items():
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative.*eager"):
            attend(**of | {name: forward_ad.make_dual(x, torch.ones_like(x))})
    functional: list[Callable[[Any], Any]] = [
        torch.func.grad,
        lambda f: lambda x: torch.vmap(torch.func.grad(f))(x[None]),
        lambda f: lambda x: torch.func.vjp(f, x)[1](torch.ones(())),
    ]
    for transform in functional:
        with pytest.raises(RuntimeError, match="functorch transforms"):
            transform(lambda x: attend(**of | {"q": x}).sum())(of["q"])


def test_forward_mode_is_refused_by_norms_and_in_a_trace() -> None:
    """Without gradients the operators' own checks are left out."""
    x, norm = torch.ones(1, 2, 3, 16), Norm("rms")

    def tangent(x: Tensor) -> Tensor:
        return torch.func.jvp(lambda y: library.attention(*call(y, x, x)), (x,), (x,))[1]

    torch.compiler.reset()
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.compile(tangent, backend="eager")(x)
    for kernel in (norm_rope.norm_rope, library.norm_rope, lambda heads: library.norm_rope_one(*heads[1:4:2], None)):
        with torch.no_grad(), forward_ad.dual_level():
            dual = forward_ad.make_dual(torch.ones(16), torch.ones(16))
            with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
                kernel(Heads(x, x, x, norm._replace(gain=dual), norm))
