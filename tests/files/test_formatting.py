"""Values in messages: short whatever they are, in every error of the API that shows one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_qknorm import Scheme, calibrate, convert_checkpoint, patch_model, push_to_hub
from hf_qknorm.files.formatting import MOST, shorten
from hf_qknorm.model.placement import placement
from qknorm_tests.tiny import tiny_model

LONG = "x" * 20_000
NESTED = {LONG + str(i): [[LONG] * 100] * 100 for i in range(100)}


def test_any_value_is_shortened():
    for value in (LONG, 10**400, 10**5000, [10**5000], NESTED, [[NESTED] * 9] * 9, torch.zeros(999)):
        assert len(shorten(value)) <= MOST + 1


def test_short_values_stay():
    for value in ("a", 3, 1.5, None, ["a", 1], {"a": (1, 2)}, 10**39):
        assert shorten(value) == repr(value)


def patched(**options: Any) -> Any:
    return patch_model(tiny_model("llama"), "qk_norm_cap", **options)


CALLS: dict[str, Callable[[], Any]] = {
    "scheme": lambda: patch_model(tiny_model("llama"), LONG),
    "field": lambda: Scheme.from_dict({LONG: 1}),
    "value": lambda: Scheme(q=LONG),
    "number": lambda: Scheme(softcap=10**5000),
    "backend": lambda: patched(attn_implementation=LONG),
    "tower": lambda: patched(tower=LONG),
    "method": lambda: calibrate(patched(), [torch.arange(3, 35)[None]], LONG),
    "knee": lambda: calibrate(patched(), [torch.arange(3, 35)[None]], knee=LONG),
    "memory": lambda: placement(Path("in"), LONG, Path("out")),
    "converted": lambda: convert_checkpoint("in", "out", LONG),
    "repository": lambda: push_to_hub(patched(), LONG),
}


@pytest.mark.parametrize("name", CALLS)
def test_errors_show_no_more_than_a_part_of_a_value(name):
    with pytest.raises((ValueError, TypeError)) as error:
        CALLS[name]()
    assert len(str(error.value)) < 3_000
