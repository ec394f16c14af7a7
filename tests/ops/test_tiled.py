"""The tiled attention in fp64, against the oracle: every shape and option, exact to rounding."""

import pytest
import torch

from hf_qknorm.ops import library, reference, tiled
from hf_qknorm.ops.types import Heads, Options, Visible
from qknorm_tests.attention_tables import LENGTH_CASES, OPTION_CASES, RANGE_CASES, SHAPE_CASES
from qknorm_tests.covering import covering
from qknorm_tests.tiled_cases import Case, draw_inputs, drawn_dropout, dropout_mask, oracle_results, tiled_results

F64 = torch.float64
SPLIT_CASES = [
    *(
        (Case(batch=5, queries=70, causal=True, softcap=50.0, mask=mask, sinks=True, dropout=dropout), logits)
        for mask, dropout, logits in covering(
            (None, "left_padding", "bool:BHTS", "add:B11S", "bool:1H1S"), (0.0, 0.3), (1, 4 * 64 * 70 * 2)
        )
    ),
    *((case, 1) for case in RANGE_CASES[::3]),
]
EVERY = [*LENGTH_CASES, *SHAPE_CASES, *OPTION_CASES, *RANGE_CASES]


def assert_is_the_oracle(case: Case) -> None:
    inputs = draw_inputs(case, F64)
    got = tiled_results(case, inputs)
    expected = oracle_results(case, inputs, drawn_dropout(case, inputs))
    assert got.keys() == expected.keys()
    for name, exact in expected.items():
        scale = max(float(exact.abs().max()), 1.0)
        torch.testing.assert_close(got[name], exact, rtol=1e-10, atol=1e-12 * scale, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_every_length_shape_and_option_is_the_oracle(case: Case) -> None:
    assert_is_the_oracle(case)


@pytest.mark.parametrize(("case", "logits"), SPLIT_CASES, ids=str)
def test_a_batch_in_parts_is_the_oracle(case: Case, logits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "LOGITS", logits)
    assert_is_the_oracle(case)


@pytest.mark.parametrize(
    ("shape", "softcap"), covering(["BHTS", "B1TS", "11TS", "1H1S", "BHT1"], [None, 5.0], strength=1)
)
def test_an_additive_mask_has_a_gradient(softcap: float | None, shape: str) -> None:
    """As of a position bias that a model learns."""
    case = Case(batch=2, queries=70, causal=True, softcap=softcap, mask=f"add:{shape}")
    inputs = draw_inputs(case, F64)
    inputs.mask.requires_grad_()
    with torch.enable_grad():
        outs = [
            attend(*call)
            for attend in (library.attention, lambda *call: reference.attend(*call).out)
            for call in [(inputs.heads, inputs.visible, case.options)]
        ]
    got, expected = (torch.autograd.grad(out, inputs.mask, inputs.grad)[0] for out in outs)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_modes_of_the_caller_do_not_change_the_numbers(mode: type[torch.no_grad]) -> None:
    """Autocast would compute products of fp32 in bf16; memory of inference mode can't be written outside of it."""
    heads = Heads(*(torch.randn(1, 4, 80, 16) for _ in range(3)))
    expected = library.attention(heads, Visible(), Options(1.0, 5.0))
    with mode(), torch.autocast("cpu", torch.bfloat16):
        made = Heads(*(x.clone() for x in heads[:3]))
        got = library.attention(made, Visible(), Options(1.0, 5.0))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("case", [case for case in EVERY if not case.dropout][::4], ids=str)
def test_statistics_are_the_oracles(case: Case) -> None:
    inputs = draw_inputs(case, F64)
    q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))
    sinks = None if inputs.sinks is None else inputs.sinks.detach()
    visible = inputs.visible._replace(sinks=sinks)
    cap = 4.0 * case.spread**2
    got = tiled.head_statistics(Heads(q, k, v), visible, case.options, cap)
    expected = reference.attend(Heads(q, k, v), visible, case.options)
    torch.testing.assert_close(got.max_logit, expected.max_logit, rtol=1e-12, atol=0)
    torch.testing.assert_close(got.entropy, expected.entropy, rtol=1e-10, atol=1e-12)
    seen = expected.weights > 0
    raw = (q @ k.repeat_interleave(case.heads // case.heads_kv, 1).transpose(-1, -2) * case.head_dim**-0.5).abs()
    for counted, limit in ((got.seen, -1.0), (got.over_half, cap / 2), (got.over_cap, cap)):
        assert counted.tolist() == (seen & (raw > limit)).sum((0, 2, 3)).tolist()


def test_statistics_count_logits_over_the_cap_and_over_half_of_it() -> None:
    """Logits 0, 6 and 12 of one query, then of another that sees the first key alone."""
    q, k = torch.ones(1, 2, 2, 1), torch.tensor([0.0, 6.0, 12.0]).view(1, 1, 3, 1)
    q[:, 1] = -2.0
    mask = torch.tensor([[True, True, True], [True, False, False]]).view(1, 1, 2, 3)
    got = tiled.head_statistics(Heads(q, k, k), Visible(mask=mask), Options(1.0), cap=10.0)
    assert [x.tolist() for x in got[2:]] == [[4, 4], [2, 2], [1, 2]]
    assert got.max_logit.tolist() == [12.0, 24.0]


DECODING = [
    Case(batch=2, heads=heads, queries=130, causal=True, softcap=cap, window=window, sinks=sinks)
    for heads, cap, window, sinks in covering((2, 14), (None, 50.0, 70.0), (None, 30), (False, True))
]


@pytest.mark.parametrize("case", DECODING, ids=str)
def test_a_decode_step_is_the_full_passes_last_row(case: Case) -> None:
    inputs = draw_inputs(case, F64)
    q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))
    sinks = None if inputs.sinks is None else inputs.sinks.detach()
    full, last = (library.attention(Heads(x, k, v), Visible(sinks=sinks), case.options) for x in (q, q[:, :, -1:]))
    torch.testing.assert_close(last, full[:, :, -1:], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("rate", "case"),
    covering([0.1, 0.5, 0.9], [Case(queries=256, causal=True), Case(queries=256, window=40, softcap=5.0)], strength=1),
    ids=str,
)
def test_the_dropout_mask_has_its_rate_where_keys_are_seen(case: Case, rate: float) -> None:
    inputs = draw_inputs(case, F64)
    options = Options(0.25, case.softcap, case.causal, case.window, rate)
    masks = [dropout_mask(inputs.heads, Visible(seed=torch.tensor([seed])), options) for seed in (3, 3, 4)]
    seen = reference.visible(256, 256, case.causal, case.window).expand(masks[0].shape)
    values = masks[0][seen]
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])
    assert torch.equal(values[values != 0], torch.full_like(values[values != 0], 1 / (1 - rate)))
    deviation = (rate * (1 - rate) / values.numel()) ** 0.5
    assert float((values == 0).double().mean()) == pytest.approx(rate, abs=5 * deviation)


def test_heads_and_blocks_draw_masks_of_their_own() -> None:
    q, k = (torch.zeros(9, heads, 128, 16) for heads in (32, 8))
    mask = dropout_mask(Heads(q, k, k), Visible(seed=torch.tensor([3])), Options(0.25, None, False, None, 0.5))
    parts = mask.view(9 * 32, 8, 16, 128).flatten(0, 1).flatten(1)  # by head, and 16 queries
    assert len(parts.unique(dim=0)) == len(parts)
