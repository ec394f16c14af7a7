"""The tiled attention's memory: the largest allocation, and no read of uninitialised numbers."""

import pytest
import torch
from torch import Tensor

from hf_qknorm.ops import library, tiled
from hf_qknorm.ops.types import Heads, Options, Visible
from qknorm_tests.covering import covering
from qknorm_tests.memory import LargestStorage, fill_new_memory
from qknorm_tests.random_qkv import make_qkv
from qknorm_tests.tiled_cases import Case, draw_inputs, draw_ranges, dropout_mask, tiled_results


def largest_of_forward_and_backward(
    q: Tensor, k: Tensor, v: Tensor, options: Options, ranges: Tensor | None = None
) -> int:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    call = (Heads(q, k, v), Visible(ranges), options)
    with LargestStorage() as largest:
        library.attention(*call).sum().backward()
        tiled.head_statistics(*call)
    return largest.elements


@pytest.mark.parametrize("ranges", [None, "shared", "packed"])
def test_the_largest_temporary_is_linear_in_the_length(ranges: str | None) -> None:
    options = Options(0.25, 50.0, causal=ranges is None)
    sizes = []
    for n in (256, 512, 1024):
        q, k, v = (x.detach() for x in make_qkv(1, 4, 2, n, n, 16))
        drawn = None if ranges is None else draw_ranges(ranges, 1, n, n)
        sizes.append(largest_of_forward_and_backward(q, k, v, options, drawn))
    assert sizes[1] <= 2 * sizes[0]
    assert sizes[2] <= 4 * sizes[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [None, 50.0])
def test_keys_and_values_are_not_repeated_for_their_group(softcap: float | None, dtype: torch.dtype) -> None:
    """With few queries, the keys themselves are the largest tensor; repeated they would be 8 times that."""
    q, k, v = (x.detach() for x in make_qkv(1, 8, 1, 4, 2048, 64, dtype=dtype))
    assert largest_of_forward_and_backward(q, k, v, Options(0.125, softcap)) == k.numel()


POISONED = [
    Case(queries=111, causal=True),
    *(Case(queries=111, keys=63, causal=True, softcap=cap, sinks=True) for cap in (None, 70.0)),
    *(Case(queries=111, softcap=50.0, mask=mask) for mask in ("nothing", "bool:B1TS", "add:BHTS")),
    Case(queries=150, causal=True, window=20, mask="left_padding", dropout=0.3),
    Case(heads=14, queries=1, keys=70, causal=True, softcap=70.0, mask="add:B11S", sinks=True, dropout=0.3),
    *(Case(queries=150, softcap=50.0, ranges=ranges, dropout=0.3) for ranges in ("left_padding", "packed")),
]


@pytest.mark.parametrize(("case", "dtype"), covering(POISONED, [torch.float32, torch.bfloat16], strength=1), ids=str)
def test_uninitialised_memory_is_never_read(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = draw_inputs(case, dtype)
    call = (inputs.heads, inputs.visible, case.options)

    @torch.no_grad()
    def everything() -> dict[str, Tensor]:
        results = tiled_results(case, inputs) | tiled.head_statistics(*call)._asdict()
        if inputs.seed is not None:
            results["dropout_mask"] = dropout_mask(*call)
        return results

    expected = everything()
    filled = fill_new_memory(monkeypatch)
    got = everything()
    assert filled
    for name, result in got.items():
        assert torch.equal(result, expected[name]), name
