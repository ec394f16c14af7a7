"""Attention with ranges of keys, in the oracle and tiled, equals attention with the same mask."""

from dataclasses import replace

import pytest
import torch

from hf_qknorm.ops import reference, tiled, tiled_blocks
from hf_qknorm.ops.types import Heads, Options
from qknorm_tests.attention_tables import RANGE_CASES
from qknorm_tests.tables import dense
from qknorm_tests.tiled_cases import Case, draw_inputs, drawn_dropout, oracle_results, tiled_results


@pytest.mark.parametrize("case", RANGE_CASES, ids=str)
def test_the_oracle_takes_ranges_for_a_mask(case: Case) -> None:
    inputs = draw_inputs(case, torch.float64)
    dropped = drawn_dropout(case, inputs)
    seen = dense(inputs.ranges, case.keys or case.queries)
    both = seen
    if inputs.mask is not None and inputs.mask.dtype == torch.bool:
        both = seen & inputs.mask
    elif inputs.mask is not None:
        both = torch.where(seen, inputs.mask, -torch.inf)
    expected = oracle_results(case, replace(inputs, mask=both, ranges=None), dropped)
    for name, result in oracle_results(case, inputs, dropped).items():
        assert torch.equal(result, expected[name]), name


@pytest.mark.parametrize("case", RANGE_CASES, ids=str)
def test_tiled_is_the_oracle(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = draw_inputs(case, torch.float64)
    for logits in (tiled_blocks.BLOCK_LOGITS, 1):  # the batch at once, and an entry at a time
        monkeypatch.setattr(tiled_blocks, "BLOCK_LOGITS", logits)
        expected = oracle_results(case, inputs, drawn_dropout(case, inputs))
        for name, result in tiled_results(case, inputs).items():
            torch.testing.assert_close(
                result, expected[name], rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("case", [case for case in RANGE_CASES if not case.dropout], ids=str)
def test_statistics_are_the_oracles(case: Case) -> None:
    inputs = draw_inputs(case, torch.float64)
    q, k, v = (x.detach() for x in inputs.heads[:3])
    sinks = None if inputs.sinks is None else inputs.sinks.detach()
    got = tiled.head_statistics(Heads(q, k, v), inputs.visible._replace(sinks=sinks), case.options)
    options = {"softcap": case.softcap, "causal": case.causal, "window": case.window}
    expected = reference.attention(q, k, v, **options, mask=inputs.mask, ranges=inputs.ranges, sinks=sinks)
    torch.testing.assert_close(got.max_logit, expected.max_logit, rtol=1e-12, atol=0)
    torch.testing.assert_close(got.entropy, expected.entropy, rtol=1e-10, atol=1e-12)
    assert got.seen.tolist() == (expected.weights > 0).sum((0, 2, 3)).tolist()


def test_a_block_reads_no_keys_outside_its_ranges() -> None:
    inputs = draw_inputs(Case(batch=1, queries=200, ranges="packed"), torch.float32)
    inputs.ranges[0, 70:80] = 0  # as in statistics, which leave out rows of padding
    problem = tiled_blocks.Problem(inputs.heads, inputs.visible, Options(1.0))
    for block in problem.blocks:
        rows = [(start, stop) for start, stop in inputs.ranges[0, block.rows].tolist() if stop > start]
        assert (block.cols.start, block.cols.stop) == (rows[0][0], min(rows[-1][1], 200))
