"""The rms of a block's outputs equals that of plain hooks, without padding, over all families with such modules."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_qknorm import LogitMonitor, logit_statistics, patch_model
from qknorm_tests.tables import make_batch, real, sharp_model, swept
from qknorm_tests.tiny import tiny_model
from qknorm_tests.watched import hooks

# the output projection of attention and that of the MLP, by hand
MODULES = {
    "bert": ("bert.encoder.layer.{}.attention.output.dense", "bert.encoder.layer.{}.output.dense"),
    "gpt2": ("transformer.h.{}.attn.c_proj", "transformer.h.{}.mlp.c_proj"),
    "gpt_neox": ("gpt_neox.layers.{}.attention.dense", "gpt_neox.layers.{}.mlp.dense_4h_to_h"),
    "llama": ("model.layers.{}.self_attn.o_proj", "model.layers.{}.mlp.down_proj"),
    "mixtral": ("model.layers.{}.self_attn.o_proj", "model.layers.{}.mlp"),
    "opt": ("model.decoder.layers.{}.self_attn.out_proj", "model.decoder.layers.{}.fc2"),
    "qwen3": ("model.layers.{}.self_attn.o_proj", "model.layers.{}.mlp.down_proj"),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "swept_type" in metafunc.fixturenames:
        metafunc.parametrize("swept_type", swept(metafunc.config))


def by_hooks(model: Any, model_type: str, batch: dict[str, Any], rows: int | None = None) -> list[tuple[float, ...]]:
    """The rms of both outputs of each layer over tokens that are not padding."""
    found: dict[str, Tensor] = {}
    names = [[name.format(i) for name in MODULES[model_type]] for i in range(2)]
    with ExitStack() as stack, torch.no_grad():
        for name in sum(names, []):

            def note(module: Any, arguments: Any, out: Any, name: str = name) -> None:
                found[name] = out[0] if isinstance(out, tuple) else out

            stack.callback(model.get_submodule(name).register_forward_hook(note).remove)
        model(**batch)
    seen = real(batch)
    tokens = {name: x.view(*seen.shape, -1)[:rows][seen[:rows]] for name, x in found.items()}
    return [tuple(float(tokens[name].double().square().mean().sqrt()) for name in layer) for layer in names]


@pytest.mark.parametrize("kind", ["plain", "left"])
@pytest.mark.parametrize("model_type", MODULES)
def test_a_sample_has_the_rms_of_the_outputs(model_type, kind):
    model, batch = sharp_model(model_type), make_batch(kind)
    monitor = LogitMonitor(every=1, rows=1)
    with monitor.watch(model, 1):
        model(**batch).loss.backward()
    assert not hooks(model)
    layers = monitor.last.layers.values()
    for layer, expected in zip(layers, by_hooks(model, model_type, batch, rows=1), strict=True):
        assert (layer.rms_out, layer.rms_mlp) == pytest.approx(expected, rel=1e-5)
    assert monitor.last.scalars()["attention/max_rms_mlp"] == max(layer.rms_mlp for layer in layers)


@pytest.mark.parametrize("model_type", ["gpt2", "mixtral"])
def test_statistics_are_means_over_all_passes(model_type):
    model, batches = patch_model(sharp_model(model_type), "qk_norm"), [make_batch("left"), make_batch("plain")]
    with logit_statistics(model) as statistics:
        for batch in batches:
            model(**batch)
    assert not hooks(model)
    counts = [int(real(batch).sum()) for batch in batches]
    sides = zip(*(by_hooks(model, model_type, batch) for batch in batches), strict=True)
    for layer, (first, second) in zip(statistics.values(), sides, strict=True):
        for found, a, b in zip((layer.rms_out, layer.rms_mlp), first, second, strict=True):
            mean = (counts[0] * a**2 + counts[1] * b**2) / sum(counts)
            assert float(found) == pytest.approx(mean**0.5, rel=1e-5)


@torch.no_grad()
def test_both_outputs_are_seen_in_every_model_type(swept_type):
    model = tiny_model(swept_type)
    with logit_statistics(model) as statistics:
        model(**make_batch("left", labels=False))
    for layer in statistics.values():
        if not layer.entropies:  # the cross-attention of a decoder alone
            continue
        assert float(layer.rms_out) > 0
        assert float(layer.rms_mlp) > 0 or swept_type == "nemotron_h"


@torch.no_grad()
def test_a_layer_without_an_mlp_has_no_number():
    model = tiny_model("nemotron_h")
    with logit_statistics(model) as statistics:
        model(**make_batch("plain", labels=False))
    assert all(layer.rms_mlp.isnan() and layer.rms_out > 0 for layer in statistics.values())
    monitor = LogitMonitor(every=1)
    with monitor.watch(model, 1):
        model(**make_batch("plain", labels=False))
    assert all(layer.rms_mlp is None for layer in monitor.last.layers.values())
    assert "attention/max_rms_mlp" not in monitor.last.scalars()
