"""Variants of the attention kernels: tiles, inner loops, splits of keys, layouts, NaN."""

import dataclasses

import pytest
import torch

from hf_qknorm.ops import library, reference
from hf_qknorm.ops.triton import attention, schedule
from hf_qknorm.ops.triton.architectures import Tile
from hf_qknorm.ops.types import Call, Heads
from qknorm_tests.attention_cases import TRITON, Case, Problem, Raw, problem, raw_problem
from qknorm_tests.covering import covering
from qknorm_tests.error_budget import assert_within_budget
from qknorm_tests.memory import fill_new_memory
from qknorm_tests.norm_cases import DEVICE, lay_out, spread
from qknorm_tests.tiles import shrink_tiles

FULL, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_tiles(monkeypatch)


@pytest.mark.parametrize("forward", [Tile(16, 16, 4, 1), Tile(64, 16, 4, 1), Tile(16, 64, 4, 1, apart=True)], ids=str)
def test_tiles_of_every_shape(forward: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_tiles(monkeypatch, forward=forward, query_gradient=forward, key_gradient=forward)
    for case in (
        Case(heads=1, heads_kv=1, queries=70, keys=60, ranges="window"),
        Case(batch=1, heads=2, heads_kv=1, queries=90, causal=True, window=37, softcap=5.0),
    ):
        problem(case, FULL, DEVICE).check(TRITON)


BOUNDS = [  # dtype, cap, sinks, knee, bounds of the two groups: a loop without a maximum, or with another tanh, and not
    (BRAIN, None, False, None, (55.0, 400.0)),
    (BRAIN, None, False, 4.0, (55.0, 400.0)),
    (BRAIN, 50.0, False, None, (0.55, 2.0)),
    (BRAIN, 100.0, False, 4.0, (0.55, 9.0)),
    (HALF, 5.0, True, None, (0.55, 40.0)),
]


@pytest.mark.parametrize(("dtype", "softcap", "sinks", "knee", "bounds"), BOUNDS)
def test_the_bound_of_a_group_of_heads_chooses_its_loop(
    dtype: torch.dtype, softcap: float | None, sinks: bool, knee: float | None, bounds: tuple[float, float]
) -> None:
    """The loop of the first group would overflow in the second, or be far from tanh."""
    raw = Raw(heads=(4, 2), dtype=dtype, gains=("per_head", "none"), length=40, rotary=(0, "none"), knee=knee)
    given = raw_problem(raw, Case(causal=True, softcap=softcap, sinks=sinks))
    q_norm = given.heads.q_norm
    q, k = (x.norm(dim=-1) for x in reference.norm_rope(given.heads._replace(q_norm=q_norm._replace(gain=None))))
    scale = given.options.scale / (softcap or 1.0)
    size = q.unflatten(1, (2, 2)).amax((0, 2, 3)) * k.amax((0, 2)) * scale  # the largest score of each group
    wanted = torch.tensor(bounds, device=DEVICE) / size
    q_norm.gain.copy_(wanted.repeat_interleave(2)[:, None].expand_as(q_norm.gain))
    given.check(TRITON)


NAN = [
    (Case(causal=True), None),
    (Case(causal=True, softcap=70.0, sinks=True), None),
    (Case(causal=True, softcap=50.0), Raw(heads=(4, 2), dtype=BRAIN)),
]


@pytest.mark.parametrize(("case", "raw", "where"), [(*row, x) for row, x in covering(NAN, "qkv", strength=1)], ids=str)
def test_nan_comes_out_where_it_goes_in(
    case: Case, raw: Raw | None, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_new_memory(monkeypatch, 7.0)  # plausible numbers
    given = raw_problem(raw, case) if raw else problem(dataclasses.replace(case, batch=1), BRAIN, DEVICE)
    exact, plain = given.expected(torch.float64)["out"], given.expected(BRAIN)["out"]
    getattr(given.heads, where)[:, 1, 50, 3] = torch.nan
    got, entropy = given.results(TRITON.attend), library.fused_statistics(*given[:3]).entropy
    assert_within_budget(got["out"][:, :, :32], exact[:, :, :32], plain[:, :, :32])  # no tile of these has NaN
    if where == "q":
        queries, keys = (slice(None), 1, 50), (slice(None), 0, slice(51))
    else:
        queries, keys = (slice(None), slice(2, 4), slice(50, None)), (slice(None), 1)
    assert got["out"][queries][..., 3 if where == "v" else slice(None)].isnan().all()
    assert got["q"][queries].isnan().all()
    assert got["k"][keys].isnan().all()
    if where != "v":  # the weights themselves
        assert entropy[queries].isnan().all()
        assert got["v"][keys].isnan().all()


@pytest.mark.parametrize("layout", ["projection", "tokens", "gaps", "sparse"])
def test_strides_change_no_bit(layout: str) -> None:
    """Heads and gradients have a projection's layout, share one buffer, or have odd strides."""
    given = problem(Case(batch=1, queries=20, causal=True, softcap=50.0), BRAIN, DEVICE)
    q, k, v = given.heads[:3]
    if layout == "projection":
        fused = torch.cat([x.transpose(1, 2).flatten(2) for x in (q, k, v)], -1)
        parts = fused.split([x.shape[1] * x.shape[3] for x in (q, k, v)], -1)
        heads = [x.unflatten(-1, (-1, q.shape[3])).transpose(1, 2) for x in parts]
        grad = given.grad.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        *heads, grad = (lay_out(x, layout) for x in (q, k, v, given.grad))
    laid_out = given._replace(heads=Heads(*heads), grad=grad)
    torch.testing.assert_close(laid_out.results(TRITON.attend), given.results(TRITON.attend), rtol=0, atol=0)


def test_the_gradient_of_a_sum() -> None:
    """It is one expanded number, with strides of zero."""
    given = problem(Case(queries=9, causal=True), FULL, DEVICE)
    ones = torch.ones(1, device=DEVICE).expand(given.grad.shape)
    found = [given._replace(grad=grad).results(TRITON.attend) for grad in (ones, ones.contiguous())]
    torch.testing.assert_close(*found, rtol=0, atol=0)


STEP, CHUNK = {"batch": 3, "heads": 8, "queries": 1, "keys": 600}, {"heads": 8, "queries": 3, "keys": 300}
# The case, its dtype, the splits of the keys if they are fixed, and how many keys of a cache are filled
SPLIT: list[tuple[Case, torch.dtype, int | None, int | None]] = [
    (Case(**STEP, causal=True, softcap=50.0), FULL, None, None),
    (Case(**STEP | {"heads": 7, "heads_kv": 1, "batch": 4}, softcap=100.0, head_dim=128), BRAIN, None, None),
    (Case(**STEP | {"keys": 3, "batch": 12}, causal=True, spread=20.0), FULL, None, None),
    (Case(**STEP, causal=True, window=1), HALF, 3, None),
    (Case(**STEP, softcap=50.0, sinks=True), HALF, 9, 300),
    (Case(**CHUNK, causal=True, head_dim=96, spread=6.0), FULL, 17, None),
    (Case(**CHUNK, causal=True, window=103, sinks=True, softcap=50.0), BRAIN, 4, None),
    (Case(**CHUNK, window=2**31 - 1, softcap=50.0), FULL, 2, None),
    (Case(**CHUNK, softcap=50.0, head_dim=80), BRAIN, None, 200),
    (Case(**CHUNK | {"keys": 257, "queries": 2}), BRAIN, 2, 2),
    (Case(**CHUNK | {"keys": 130}, causal=True, softcap=50.0, sinks=True, head_dim=256), BRAIN, 2, None),
    (Case(batch=1, heads=7, heads_kv=1, queries=23, keys=150, causal=True, sinks=True), FULL, 3, None),  # three blocks
    (Case(batch=1, heads=2, heads_kv=1, queries=35, keys=256), HALF, 3, 100),
]


def fill(given: Problem, filled: int) -> Problem:
    """As in a static cache with left padding: causal ranges over so many keys, and large numbers behind them."""
    (batch, _, queries, _), (_, k, v, *_) = given.heads.q.shape, given.heads
    for x in (k, v):
        x[:, :, filled:] = 3e4 * torch.randn_like(x[:, :, filled:]).sign()
    stop = torch.arange(filled - queries, filled) + 1
    start = torch.minimum(2 * torch.arange(batch)[:, None], stop)
    ranges = torch.stack([start, stop.expand(batch, -1)], -1).to(DEVICE, torch.int32)
    return given._replace(visible=given.visible._replace(ranges=ranges))


def force(monkeypatch: pytest.MonkeyPatch, splits: int | None) -> None:
    """Let no other forward kernel run, and fix the number of splits."""
    monkeypatch.setattr(attention, "forward_kernel", None)
    monkeypatch.setattr(schedule, "gpu", lambda device: schedule.HOPPER)
    if splits is not None:
        monkeypatch.setattr(attention.attention_decode, "splits", lambda q, k: splits)


@pytest.mark.parametrize(("case", "dtype", "splits", "filled"), SPLIT, ids=str)
def test_the_output_of_few_queries_over_many_keys(
    case: Case, dtype: torch.dtype, splits: int | None, filled: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(monkeypatch, splits)
    given = problem(case, dtype, DEVICE)
    given = given if filled is None else fill(given, filled)
    exact, plain = (given.attended(spread(given.leaves, x)) for x in (torch.float64, dtype))
    out = TRITON.attend(Call(*given[:3]))
    assert out.transpose(1, 2).is_contiguous()
    assert not out[exact.weights.sum(-1) == 0].any()
    assert_within_budget(out, exact.out.detach(), plain.out.detach())


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (Case(batch=1, heads=5, heads_kv=1, queries=3, keys=260, causal=True, softcap=50.0, sinks=True), BRAIN),
        (Case(heads=3, heads_kv=1, queries=2, keys=260, causal=True, window=250, ranges="left_padding"), HALF),
        (Case(batch=1, heads=4, heads_kv=1, queries=3, keys=260, spread=5.0, causal=True), FULL),
    ],
    ids=str,
)
def test_gradients_after_a_split_forward_pass(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, 2)
    problem(case, dtype, DEVICE).check(TRITON)


def test_strides_and_nan_of_few_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, 3)
    given = problem(Case(**CHUNK | {"heads": 4, "batch": 1}, causal=True, softcap=50.0), BRAIN, DEVICE)
    expected = TRITON.attend(Call(*given[:3]))
    for queries, keys in (("tokens", "gaps"), ("sparse", "gaps"), ("gaps", "sparse")):
        view = Heads(*(lay_out(x, y) for x, y in zip(given.heads[:3], (queries, keys, keys), strict=True)))
        assert torch.equal(TRITON.attend(Call(view, *given[1:3])), expected)
    given.heads.q[0, 0] = torch.nan
    out = TRITON.attend(Call(*given[:3]))
    assert out[0, 0].isnan().all()
    assert out[:, 1:].isfinite().all()
