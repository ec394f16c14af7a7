"""Adapters on a patched model: norms get the projections' output with the adapter, and merging is exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_qknorm import FAMILIES, SCHEMES, patch_model
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.derived import QKNormModel
from qknorm_tests.adapters import adapted, set_adapters
from qknorm_tests.covering import covering
from qknorm_tests.tables import MODEL_TYPES, applies, assert_near, make_batch, randomise, sharp_model

PRESETS = ("qk_norm_cap", "qkv_norm", "soft_cap")
MODELS = covering(MODEL_TYPES, PRESETS, fits=lambda t, name: applies(t, SCHEMES[name]), strength=1)
TOLERANCE = 1e-5

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing:FutureWarning",  # peft uses the old name
    "ignore:fan_in_fan_out:UserWarning",
)


def normed_queries(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The output of the first layer's query norm."""
    seen: list[Tensor] = []
    layer = next(iter(patched_layers(model).values()))
    handle = layer.q_norm.register_forward_hook(lambda module, args, output: seen.append(output))
    model(**batch)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("model_type", [t for t in MODEL_TYPES if not FAMILIES[t].own_norms])
@torch.no_grad()
def test_the_norm_sees_the_adapters_output(model_type):
    model = adapted(randomise(patch_model(sharp_model(model_type), "qk_norm")))
    batch = make_batch("plain", labels=False)
    first = normed_queries(model, batch)
    set_adapters(model, seed=1)
    second = normed_queries(model, batch)
    assert not torch.allclose(first, second, atol=1e-2)
    gain = next(iter(patched_layers(model).values())).q_norm.weight
    if FAMILIES[model_type].norm == "rms":  # the norm's output has rms 1, whatever the adapter adds
        torch.testing.assert_close((second / gain).square().mean(-1), torch.ones(second.shape[:-1]), rtol=0, atol=1e-3)


@pytest.mark.parametrize(("model_type", "preset"), MODELS)
@torch.no_grad()
def test_merging_is_exact(model_type, preset):
    model = adapted(randomise(patch_model(sharp_model(model_type), preset)))
    batch = make_batch("left")
    expected = model(**batch).logits
    with model.disable_adapter():
        assert not torch.allclose(model(**batch).logits, expected, atol=1e-2), "the adapters matter"
    merged = model.merge_and_unload()
    assert isinstance(merged, QKNormModel)
    assert_near(merged(**batch).logits, expected, TOLERANCE)
