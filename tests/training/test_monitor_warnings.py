"""The warnings of LogitMonitor: of large logits, and of small entropies."""

from __future__ import annotations

import logging

from hf_qknorm import LogitMonitor, patch_model
from hf_qknorm.model.attention import patched_layers
from qknorm_tests.tables import make_batch, sharp_model


def test_warns_once_until_the_head_recovers(caplog):
    model, batch = patch_model(sharp_model("llama"), "none"), make_batch("plain")
    monitor = LogitMonitor(every=1)
    first = patched_layers(model)["model.layers.0.self_attn"]
    weight = first.q_proj.weight.data.clone()
    warnings = []
    for step, factor in enumerate((1, 200, 200, 1, 200)):
        first.q_proj.weight.data[:16] = weight[:16] * factor  # head 0 alone
        caplog.clear()
        with caplog.at_level(logging.WARNING), monitor.watch(model, step):
            model(**batch)
        warnings.append([record.getMessage() for record in caplog.records])
    assert [len(lines) for lines in warnings] == [0, 2, 0, 0, 2]
    assert all("step 1: model.layers.0.self_attn, head 0: " in line for line in warnings[1])
    assert "|logit| over 100" in warnings[1][0]
    assert "entropy under" in warnings[1][1]
    assert "10% of uniform attention's" in warnings[1][1]


def test_heads_of_a_layer_share_a_line(caplog):
    model, batch = patch_model(sharp_model("llama"), "none"), make_batch("plain")
    weight = patched_layers(model)["model.layers.1.self_attn"].q_proj.weight.data
    weight[:16] *= 200
    weight[32:48] *= 400
    monitor = LogitMonitor(every=1)
    with caplog.at_level(logging.WARNING), monitor.watch(model, 1):
        model(**batch)
    layer = monitor.last.layers["model.layers.1.self_attn"]
    numbers = f"|logit| up to {layer.max_logit[2]:.4g}, entropy down to {min(layer.entropy[0], layer.entropy[2]):.3g}"
    first, second = (record.getMessage() for record in caplog.records)
    assert first == f"step 1: model.layers.1.self_attn, heads 0, 2: |logit| over 100 ({numbers})"
    assert second.startswith("step 1: model.layers.1.self_attn, heads 0, 2: entropy under ")


def test_nan_logits_warn(caplog):
    model = patch_model(sharp_model("llama"), "none")
    model.model.layers[0].self_attn.q_proj.weight.data[:16] = float("inf")
    monitor = LogitMonitor(every=1)
    with caplog.at_level(logging.WARNING), monitor.watch(model, 3):
        model(**make_batch("plain"))
    assert "step 3: model.layers.0.self_attn, head 0: |logit| over 100" in caplog.text
    assert monitor.last.worst()[:2] == ("model.layers.0.self_attn", 0)
