"""Masks in a model that torch.compile traces: the same ranges, without a look at what they hold, and linear too."""

from __future__ import annotations

import math
import re
import shutil

import pytest
import torch
from mask_cases import HOLES, PADDING, POSITIONS, config, create, even, transformers_own
from torch._inductor.utils import run_and_get_code

from hf_qknorm.masks import is_ranges

pytestmark = pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch's own


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("given", ["left", "both", "packed"])
@pytest.mark.parametrize("kind", ["causal", "window"])
def test_a_trace_reads_the_same_ranges(kind, given):
    settings = config(kind)
    arguments = {"position_ids": POSITIONS} if given == "packed" else {"padding": torch.tensor(PADDING[given])}
    compiled = torch.compile(create, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(kind, settings, 9, **arguments), create(kind, settings, 9, **arguments))


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor on the CPU needs a C++ compiler")
@pytest.mark.parametrize("kind", ["causal", "window"])
def test_a_compiled_mask_is_linear(kind):
    """Inductor fuses the T×S mask into what is read from it: no buffer is that large."""
    length, settings = 500, config(kind, 100)
    with torch._inductor.config.patch(fx_graph_cache=False):
        positions = torch.arange(length).remainder(200)[None]
        mask, code = run_and_get_code(
            torch.compile(create, fullgraph=True), kind, settings, length, position_ids=positions
        )
    assert torch.equal(mask, create(kind, settings, length, position_ids=positions))
    shapes = re.findall(r"empty_strided_cpu\(\(([\d, ]*)\)", "".join(code))
    assert 0 < max(math.prod(int(n) for n in re.findall(r"\d+", shape)) for shape in shapes) <= 8 * length


def test_a_trace_keeps_the_mask_of_a_users_own_function():
    compiled = torch.compile(create, fullgraph=True, backend="aot_eager")
    expected = transformers_own("causal", config("causal"), 9, and_mask_function=even)
    assert torch.equal(compiled("causal", config("causal"), 9, and_mask_function=even), expected)


def test_holes_in_a_trace_are_refused():
    compiled = torch.compile(create, fullgraph=True, backend="aot_eager")
    settings = config("causal")
    assert is_ranges(compiled("causal", settings, 9, torch.ones_like(HOLES)))
    with pytest.raises(RuntimeError, match=r"keys without a gap.*boolean attention_mask \[B, 1, T, S\]"):
        compiled("causal", settings, 9, HOLES)
