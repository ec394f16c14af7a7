"""Bundled definitions: one name each, in an order that runs, and only those that are needed."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from hf_qknorm.ops import reference
from hf_qknorm.standalone.bundler import Bundle

PROJECTIONS = (("hf_qknorm.families.style", "project"), ("hf_qknorm.families.latent", "project"))


@pytest.fixture
def run(monkeypatch):
    """Run a text as a module and return its names."""

    def names(text: str) -> dict[str, Any]:
        module = ModuleType("bundled")
        monkeypatch.setitem(sys.modules, "bundled", module)
        exec(compile(text, "bundled", "exec"), vars(module))
        return vars(module)

    return names


def test_bundled_code_computes_the_same_as_the_package(run):
    bundled = run(Bundle((("hf_qknorm.ops.reference", "attention"),)).text())
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 5, 8) for heads in (4, 2, 2))
    got = bundled["attention"](q, k, v, softcap=2.0, causal=True, window=3)
    expected = reference.attention(q, k, v, softcap=2.0, causal=True, window=3)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_definitions_of_equal_names_get_their_modules_names(run):
    bundle = Bundle(PROJECTIONS)
    assert [bundle.bundled_name(root) for root in PROJECTIONS] == ["style_project", "latent_project"]
    names = run(bundle.text())
    assert "project" not in names
    assert {"style_project", "latent_project"} <= set(names)


def test_a_table_is_limited_to_the_given_keys(run):
    table = ("hf_qknorm.families", "FAMILIES")
    kept = ("gpt2", "llama", "recurrent_gemma")  # the last has several lines
    names = run(Bundle((table,), entries={table: kept}).text())
    assert tuple(names["FAMILIES"]) == kept
    with pytest.raises(ValueError, match="no key 'mamba'"):
        Bundle((table,), entries={table: ("llama", "mamba")})


def test_imports_inside_functions_are_refused():
    with pytest.raises(ValueError, match="function imports the package"):
        Bundle((("hf_qknorm.cli", "demo"),))
