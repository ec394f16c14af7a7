"""A norm is one entry of `norms.NORMS`: schemes, the oracle and the kernels take a new one from there."""

from __future__ import annotations

import pytest
import torch
from test_norm_rope import test_results_and_gradients as check_kernels
from torch import Tensor

from hf_qknorm.convert.papers import change_sentences
from hf_qknorm.ops.norms import NORMS, NormKind
from hf_qknorm.ops.reference import head_norm
from hf_qknorm.scheme import Scheme
from qknorm_tests.norm_cases import BRAIN, Case


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


# Combinations of properties that no norm of the table has, and their formulas without ε for p = 3.
NEW = {
    "one_layer": (
        NormKind("unit LayerNorm", centred=True, summed=True),
        lambda x: centred(x).norm(dim=-1),
    ),
    "power": (NormKind("the power mean", any_order=True), lambda x: x.abs().pow(3).mean(-1).pow(1 / 3)),
    "centred_power": (
        NormKind("the power mean", centred=True, any_order=True),
        lambda x: centred(x).abs().pow(3).mean(-1).pow(1 / 3),
    ),
    "centred_lp": (
        NormKind("the Lp norm", centred=True, summed=True, any_order=True),
        lambda x: centred(x).norm(p=3, dim=-1),
    ),
}


@pytest.mark.parametrize("name", NEW)
def test_a_new_norm_is_one_entry(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, size = NEW[name]
    with pytest.raises(ValueError, match=r"expected one of .* \"auto\" or None"):
        Scheme(q=name)
    monkeypatch.setitem(NORMS, name, kind)
    scheme = Scheme(q=name, k=name, p=3.0 if kind.any_order else 2.0)
    assert kind.title in change_sentences(scheme)[0]

    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = centred(x) if kind.centred else x
    torch.testing.assert_close(head_norm(x, name, eps=1e-30, p=3.0), y / size(x)[..., None])

    check_kernels(Case(norms=(name, name), head_dim=40, rotary=(20, "half"), gains=("shared", "none")))
    check_kernels(Case(norms=("rms", name), head_dim=64, dtype=BRAIN, biases=("none", "shared"), knee=4.0))
