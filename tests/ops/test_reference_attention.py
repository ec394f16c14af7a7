"""The oracle's attention, against torch's own, against the models' own eager functions, and against brute force."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import sliding_window_bidirectional_mask_function, sliding_window_causal_mask_function
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_attention
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_attention

from hf_qknorm.ops.reference import attention, visible
from qknorm_tests.attention_cases import Case, problem
from qknorm_tests.attention_tables import TABLE
from qknorm_tests.covering import covering
from qknorm_tests.random_qkv import make_qkv
from qknorm_tests.tables import dense

F64 = torch.float64


def randomly(*shape: int, kept: float = 0.7, seed: int = 7) -> Tensor:
    """A boolean mask in which every query sees key 0."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < kept
    mask[..., 0] = True
    return mask


def additive(mask: Tensor, dtype: torch.dtype = F64) -> Tensor:
    """The mask as transformers' additive one, with a bias for visible keys."""
    bias = torch.randn(mask.shape, generator=torch.Generator().manual_seed(8), dtype=dtype)
    return torch.where(mask, bias, torch.finfo(dtype).min)


def group_of(heads_kv: int, heads: int = 4, **settings: object) -> SimpleNamespace:
    """The attributes of a module that the models' eager functions read."""
    return SimpleNamespace(num_key_value_groups=heads // heads_kv, training=False, **settings)


SDPA = {
    "plain": {},
    "causal": {"causal": True},
    "bool": {"mask": randomly(2, 1, 9, 9)},
    "bool_per_head": {"mask": randomly(1, 4, 9, 9)},
    "keys": {"mask": randomly(2, 1, 1, 9)},
    "additive": {"mask": additive(randomly(2, 4, 9, 9))},
}


@pytest.mark.parametrize(("case", "scale", "heads_kv"), covering(SDPA, [None, 0.3], [1, 2, 4], strength=1))
def test_uncapped_it_is_sdpa(case: str, scale: float | None, heads_kv: int) -> None:
    q, k, v = make_qkv(2, 4, heads_kv, 9, 9, 12, dtype=F64)
    options = SDPA[case]
    expected = F.scaled_dot_product_attention(
        q, k, v, options.get("mask"), is_causal=options.get("causal", False), scale=scale, enable_gqa=True
    )
    got = attention(q, k, v, scale=scale, **options)
    torch.testing.assert_close(got.out, expected, rtol=1e-12, atol=1e-13)
    ours, theirs = (torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (got.out, expected))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "softcap", "heads_kv"), covering([F64, torch.float32], [5.0, 50.0], [1, 2, 4], strength=1), ids=str
)
def test_capped_it_is_gemma_2(dtype: torch.dtype, softcap: float, heads_kv: int) -> None:
    q, k, v = make_qkv(2, 4, heads_kv, 9, 11, 12, dtype=dtype, spread=3.0)
    mask = additive(randomly(2, 1, 9, 11), dtype)
    out, weights = gemma2_attention(group_of(heads_kv), q, k, v, mask, scaling=0.2, softcap=softcap)
    got = attention(q, k, v, scale=0.2, softcap=softcap, mask=mask)
    tolerance = {"rtol": 1e-5, "atol": 1e-6}  # Gemma 2's softmax runs in fp32
    torch.testing.assert_close(got.out.transpose(1, 2), out, **tolerance)
    torch.testing.assert_close(got.weights.to(dtype), weights, **tolerance)


@pytest.mark.parametrize("heads_kv", [1, 2, 4])
def test_sinks_are_gpt_oss(heads_kv: int) -> None:
    q, k, v = make_qkv(2, 4, heads_kv, 9, 11, 12, dtype=F64)
    mask, sinks = additive(randomly(2, 1, 9, 11)), torch.linspace(-2, 3, 4, dtype=F64, requires_grad=True)
    out, weights = gpt_oss_attention(group_of(heads_kv, sinks=sinks), q, k, v, mask, scaling=0.2)
    got = attention(q, k, v, scale=0.2, mask=mask, sinks=sinks)
    torch.testing.assert_close(got.out.transpose(1, 2), out, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(got.weights, weights, rtol=1e-12, atol=1e-13)
    ours, theirs = (torch.autograd.grad(x.square().sum(), sinks)[0] for x in (got.out, out))
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("causal", "size", "window"), covering([True, False], [(8, 8), (1, 8), (3, 8), (8, 5)], [1, 3, 8, 20]), ids=str
)
def test_windows_are_those_of_transformers(causal: bool, size: tuple[int, int], window: int) -> None:
    queries, keys = size
    function = sliding_window_causal_mask_function if causal else sliding_window_bidirectional_mask_function
    positions = torch.arange(queries) + keys - queries
    expected = function(window)(torch.tensor(0), torch.tensor(0), positions[:, None], torch.arange(keys)[None])
    counted = positions >= (-queries if causal else 0)  # their bidirectional mask has no query before the first key
    assert torch.equal(visible(queries, keys, causal, window)[counted], expected[counted])


@pytest.mark.parametrize("case", [case for case in TABLE if case.ranges and not case.dropout][::2], ids=str)
def test_ranges_are_masks(case: Case) -> None:
    given = problem(case, F64)
    ranges, mask = given.visible.ranges, given.visible.mask
    both = seen = dense(ranges, given.heads.k.shape[2])
    if mask is not None:
        both = seen & mask if mask.dtype == torch.bool else torch.where(seen, mask, -torch.inf)
    masked = given._replace(visible=given.visible._replace(ranges=None, mask=both)).expected(F64)
    for name, x in given.expected(F64).items():
        assert torch.equal(x, masked[name]), name


def empty_rows(kind: str) -> tuple[int, dict[str, object], Tensor]:
    """Queries, options by which some of them see no key, and whether each does, `[T]`."""
    if kind == "before_the_first_key":
        return 9, {"causal": True}, torch.arange(9) < 3
    empty = torch.tensor([True, False, False, True, False, False])
    mask = (~empty)[None, None, :, None] & randomly(2, 1, 6, 6)
    if kind == "bool":
        return 6, {"mask": mask}, empty
    low = torch.finfo(F64).min if kind == "finfo_min" else -math.inf
    return 6, {"mask": torch.zeros(mask.shape, dtype=F64).masked_fill(~mask, low)}, empty


@pytest.mark.parametrize(
    ("softcap", "with_sinks", "kind"),
    covering([None, 5.0], [False, True], ["before_the_first_key", "bool", "finfo_min", "minus_inf"]),
)
def test_queries_without_a_key_give_zero(softcap: float | None, with_sinks: bool, kind: str) -> None:
    queries, options, empty = empty_rows(kind)
    q, k, v = make_qkv(2, 4, 2, queries, 6, 8, dtype=F64)
    sinks = torch.ones(4, dtype=F64, requires_grad=True) if with_sinks else None
    got = attention(q, k, v, softcap=softcap, sinks=sinks, **options)
    inputs = [x for x in (q, k, v, sinks) if x is not None]
    grads = torch.autograd.grad(got.out.sin().sum(), inputs)
    assert all(torch.isfinite(grad).all() for grad in grads)
    assert all((x[:, :, empty] == 0).all() for x in (got.out, got.weights, grads[0]))
    assert all((x[:, :, ~empty] != 0).any(-1).all() for x in (got.out, got.weights))
    torch.autograd.backward(attention(q, k, v, softcap=softcap, sinks=sinks, **options).out[:, :, empty].sum())
    assert all((x.grad == 0).all() for x in inputs)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("kind", ["before_the_first_key", "bool", "finfo_min"])
def test_statistics_are_those_of_brute_force(kind: str, with_sinks: bool) -> None:
    queries, options, empty = empty_rows(kind)
    q, k, v = (x.detach() for x in make_qkv(2, 4, 2, queries, 6, 8, dtype=F64, spread=3.0))
    sinks = torch.linspace(-2, 3, 4, dtype=F64) if with_sinks else None
    got = attention(q, k, v, scale=0.5, softcap=5.0, sinks=sinks, **options)
    for head in range(4):
        largest, entropies = 0.0, []
        for b in range(2):
            for i in torch.arange(queries)[~empty].tolist():
                seen = (got.weights[b, head, i] > 0).nonzero().flatten().tolist()
                raw = [0.5 * float(q[b, head, i] @ k[b, head // 2, j]) for j in seen]
                largest = max([largest, *map(abs, raw)])
                powers = [math.exp(5.0 * math.tanh(s / 5.0)) for s in raw]
                powers += [] if sinks is None else [math.exp(sinks[head])]
                entropies.append(-sum(w / sum(powers) * math.log(w / sum(powers)) for w in powers))
        assert float(got.max_logit[head]) == pytest.approx(largest, rel=1e-12)
        assert float(got.entropy[head]) == pytest.approx(sum(entropies) / len(entropies), rel=1e-12)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradients_are_those_of_the_definition(softcap: float | None) -> None:
    q, k, v = make_qkv(1, 2, 1, 3, 4, 2, dtype=F64)
    sinks = torch.linspace(-1, 1, 2, dtype=F64, requires_grad=True)
    mask = additive(randomly(1, 1, 3, 4))
    kept = randomly(1, 2, 3, 4, seed=9) / 0.7

    def out(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return attention(q, k, v, softcap=softcap, causal=True, window=3, mask=mask, sinks=sinks, dropout_mask=kept).out

    assert torch.autograd.gradcheck(out, (q, k, v, sinks))
    soft = mask.clamp_min(-1.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda bias: attention(q, k, v, softcap=softcap, mask=bias).out, (soft,))
