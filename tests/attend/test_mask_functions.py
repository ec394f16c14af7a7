"""Closed forms of transformers' mask functions, and functions that are changed under the same names."""

from types import FunctionType
from typing import Any

import pytest
import torch
from transformers import masking_utils

from hf_qknorm import Scheme
from hf_qknorm.attend import mask_functions
from hf_qknorm.attend.calls import is_ranges
from hf_qknorm.patch import patched_config
from qknorm_tests.mask_cases import config, create, padded, transformers_own
from qknorm_tests.tables import dense


def first_half(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key <= query // 2


def wider_window(sliding_window: int) -> Any:
    """transformers' `sliding_window_overlay`, with one key more."""

    def inner_mask(batch_idx: int, head_idx: int, q_idx: int, kv_idx: int) -> Any:
        return kv_idx >= q_idx - sliding_window

    return inner_mask


def as_transformers(function: Any, name: str) -> Any:
    """The function, or the functions that it makes, under the name of one of transformers'."""

    def named(result: Any) -> Any:
        result.__module__ = masking_utils.__name__
        result.__qualname__ = result.__qualname__.replace(function.__name__, name).removeprefix("<lambda>.")
        return result

    if function is first_half:
        return named(FunctionType(function.__code__, vars(masking_utils), name))
    return lambda *captured: named(function(*captured))


@pytest.mark.parametrize(
    ("name", "changed", "kind", "padding"),
    [
        ("causal_mask_function", first_half, "causal", "left"),
        ("sliding_window_overlay", wider_window, "window", "none"),
        ("sliding_window_overlay", wider_window, "window", "left"),
    ],
)
def test_a_changed_function_of_a_known_name_is_read_key_by_key(name, changed, kind, padding, monkeypatch, caplog):
    monkeypatch.setattr(masking_utils, name, as_transformers(changed, name))
    given = padded(padding)
    settings = patched_config(config(kind), Scheme(softcap=2.0))  # a window that layers pass is checked, too
    expected = transformers_own(kind, settings, 9, given)
    mask_functions._is_as_expected.cache_clear()
    for _ in range(2):
        mask = create(kind, settings, 9, given)
        assert torch.equal(dense(mask[:, 0], 9) if is_ranges(mask) else mask, expected)
    assert sum(name in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_transformers_functions_match_their_closed_forms(default, caplog):
    mask_functions._is_as_expected.cache_clear()
    for name in mask_functions._EXPECTED:
        if name == "remap_positions_for_packed_sequence" and not hasattr(masking_utils, name):
            continue  # transformers 5.17 lacks it
        factory = getattr(masking_utils, name)
        captured, _ = mask_functions._EXPECTED[name]
        values = captured.get("mask_functions", tuple(captured.values()))
        code = (factory(*values) if captured else factory).__code__
        with torch.device(default):
            assert mask_functions._is_as_expected(code, name), name
    assert not caplog.records
