"""Masks under torch.compile: the same ranges, without reading their numbers, in linear memory."""

import math
import re
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from transformers import masking_utils

from hf_qknorm import Scheme, patch_model
from hf_qknorm.attend.calls import make_call
from hf_qknorm.attend.masks import structured_mask
from hf_qknorm.ops import reference
from hf_qknorm.ops.types import Heads
from qknorm_tests.covering import covering
from qknorm_tests.mask_cases import PADDING, assert_ranges, config, create, even, padded, transformers_own
from qknorm_tests.random_qkv import make_qkv
from qknorm_tests.tables import assert_near, randomise, sharp_model

pytestmark = [
    pytest.mark.costly,
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),  # torch's own
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    module: Any = SimpleNamespace(is_causal=True, runs_own_forward=False)
    return reference.attend(*make_call(module, Heads(q, k, v), mask)).out


GIVEN = [name for name, rows in PADDING.items() if rows and name != "holes"]


@pytest.mark.parametrize(
    ("kind", "given", "queries"), covering(["causal", "window", "bidirectional"], GIVEN, [9, 1], strength=1)
)
def test_a_trace_gets_ranges(kind, given, queries):
    """Each query sees the same keys as without a trace."""
    settings, padding = config(kind), padded(given)
    mask = torch.compile(create, fullgraph=True, backend="aot_eager")(kind, settings, 9, padding)
    assert_ranges(mask, 2, 9, 9)
    q, k, v = make_qkv(2, 4, 2, 9, 9, 8)
    expected = transformers_own(kind, settings, 9, padding)
    if queries == 1:  # as in a decode step: the last query alone
        mask, q, expected = mask[:, :, -1:], q[:, :, -1:], expected[:, :, -1:]
    assert_near(attend(q, k, v, mask), attend(q, k, v, expected), 1e-6)


def test_gaps_that_a_trace_did_not_expect_are_refused():
    """Padding between the tokens of a row, or a conjunction; outside of a trace they are a boolean mask."""

    def with_gaps() -> Tensor | None:
        function = masking_utils.and_masks(masking_utils.causal_mask_function, even)
        return structured_mask(1, 9, 9, mask_function=function, allow_is_causal_skip=False)

    settings = config("causal")
    for build in (with_gaps, lambda: create("causal", settings, 9, padded("holes"))):
        with pytest.raises(RuntimeError, match=r"keys without a gap.*boolean attention_mask \[B, 1, T, S\]"):
            torch.compile(build, fullgraph=True, backend="aot_eager")()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor on the CPU needs a C++ compiler")
@pytest.mark.parametrize(("kind", "given"), [("causal", "padding"), ("window", "positions")])
def test_a_compiled_mask_is_linear(kind, given):
    """Inductor fuses the T×S mask into its reductions: no buffer is that large."""
    length, settings = 500, config(kind, 100)
    arguments = {"position_ids": torch.arange(length).remainder(200)[None]}
    if given == "padding":
        arguments = {"padding": torch.arange(length).expand(2, -1) > 6}
    with torch._inductor.config.patch(fx_graph_cache=False):
        mask, code = run_and_get_code(torch.compile(create, fullgraph=True), kind, settings, length, **arguments)
    traced = torch.compile(create, fullgraph=True, backend="aot_eager")(kind, settings, length, **arguments)
    assert torch.equal(mask, traced)
    shapes = re.findall(r"empty_strided_cpu\(\(([\d, ]*)\)", "".join(code))
    assert 0 < max(math.prod(int(n) for n in re.findall(r"\d+", shape)) for shape in shapes) <= 8 * length


def test_a_trace_keeps_the_mask_of_a_users_own_function():
    compiled = torch.compile(create, fullgraph=True, backend="aot_eager")
    expected = transformers_own("causal", config("causal"), 9, and_mask_function=even)
    assert torch.equal(compiled("causal", config("causal"), 9, and_mask_function=even), expected)


@pytest.mark.slow
@torch.no_grad()
def test_an_exported_model_with_padding_takes_other_lengths():
    """Its graph has operators of torch alone, so that it runs, and becomes an ONNX file, without this package.

    It holds the knees of its norms.
    """
    model = patch_model(sharp_model("llama", num_hidden_layers=1), Scheme(q="auto", k="auto", softcap=5.0)).eval()
    randomise(model, knee=2.0)
    tokens, mask = torch.randint(64, (2, 12)), torch.ones(2, 12, dtype=torch.int64)
    mask[0, :3], mask[1, 9:] = 0, 0
    length = torch.export.Dim.DYNAMIC  # torch 2.11 takes no largest length, of unpatched models either
    shapes = {"input_ids": {1: length}, "attention_mask": {1: length}, "use_cache": None}
    given = {"input_ids": tokens[:, 4:].clone(), "attention_mask": mask[:, 4:].clone(), "use_cache": False}
    program = torch.export.export(model, (), given, dynamic_shapes=shapes)
    operators = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not {name for name in operators if "hf_qknorm" in name or "cummin" in name}  # ONNX has no cummin
    assert sum(name.endswith("_norm.knee") for name in program.state_dict) == 2
    exported = program.module()
    given = {"input_ids": tokens, "attention_mask": mask, "use_cache": False}
    got, expected = (each(**given).logits[mask.bool()] for each in (exported, model))
    assert_near(got, expected, 1e-5)
