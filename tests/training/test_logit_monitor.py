"""LogitMonitor: its numbers, its steps, its warnings, and a clean model between samples."""

from __future__ import annotations

import logging
from contextlib import ExitStack

import pytest
import torch

from hf_qknorm import LogitMonitor, patch_model
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.ops import reference
from hf_qknorm.training.logit_log import LogitSample, read_log
from qknorm_tests.covering import covering
from qknorm_tests.tables import BATCHES, assert_identical, fingerprint, make_batch, randomise, sharp_model
from qknorm_tests.tables import step as training_step
from qknorm_tests.tiny import tiny_model
from qknorm_tests.watched import gradients_by_hand, hooks

FAMILIES = ["llama", "gpt2", "gpt_neox", "phi3", "mistral", "qwen3"]  # GQA, fused weights, windows, own norms


def calls(model, batch):
    """The arguments of each layer's attention function, recorded without the monitor."""
    found = {}
    with ExitStack() as stack, torch.no_grad():
        for name, layer in patched_layers(model).items():

            def note(layer, q, k, v, mask, options, name=name):
                found[name] = (q, k, v, options)

            layer.observers = (note,)
            stack.callback(delattr, layer, "observers")
        model(**batch)
    return found


def seen_by(batch, window):
    """The boolean mask `[B, 1, T, T]` of real queries and keys: causal, windowed, with separate packed sequences."""
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    mask = reference.visible(real.shape[1], real.shape[1], True, window) & real[:, None, :] & real[:, :, None]
    if "position_ids" in batch:
        sequence = (batch["position_ids"] == 0).cumsum(-1)
        mask = mask & (sequence[:, None, :] == sequence[:, :, None])
    return mask[:, None]


@pytest.mark.parametrize(("family", "kind"), covering(FAMILIES, BATCHES, strength=1))
def test_a_sample_equals_the_reference(family, kind):
    scheme = "soft_cap" if family == "qwen3" else "qk_norm_cap"
    model = randomise(patch_model(sharp_model(family), scheme))
    batch = make_batch(kind)
    monitor = LogitMonitor(every=1, rows=2)
    with monitor.watch(model, 1):
        model(**batch).loss.backward()
    assert list(monitor.last.layers) == list(patched_layers(model))
    for name, (q, k, v, options) in calls(model, batch).items():
        layer = monitor.last.layers[name]
        seen = seen_by(batch, options["sliding_window"])
        exact = reference.attention(q, k, v, scale=options["scaling"], softcap=50.0, mask=seen)
        torch.testing.assert_close(torch.tensor(layer.max_logit), exact.max_logit, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.tensor(layer.entropy), exact.entropy, rtol=1e-4, atol=1e-5)
        keys = seen.sum(-1)
        even = float(keys.clamp_min(1).log().sum() / (keys > 0).sum())
        assert layer.even == pytest.approx(even, rel=1e-5)
        assert layer.cap == 50


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_norms_equal_those_of_the_rows(family):
    model = patch_model(sharp_model(family), "none")
    monitor = LogitMonitor(every=5)
    with monitor.watch(model, 10):
        for _ in range(2):  # accumulated over all micro-batches
            model(**make_batch("left")).loss.backward()
    for name, layer in patched_layers(model).items():
        found = monitor.last.layers[name]
        for got, expected in zip((found.grad_q, found.grad_k), gradients_by_hand(family, layer), strict=True):
            torch.testing.assert_close(torch.tensor(got), expected, rtol=1e-5, atol=0)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")  # peft uses the old name
def test_gradients_of_adapters_are_one_number():
    peft = pytest.importorskip("peft")
    model = patch_model(sharp_model("llama"), "none")
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    monitor = LogitMonitor(every=1)
    with monitor.watch(model, 1):
        model(**make_batch("plain")).loss.backward()
    for name, layer in patched_layers(model).items():
        grads = [p.grad.flatten() for p in layer.q_proj.parameters() if p.grad is not None]
        assert monitor.last.layers[name].grad_q == pytest.approx([float(torch.cat(grads).norm())])
        assert monitor.last.layers[name].grad_k is None


def test_a_bare_loop_samples_every_nth_step(tmp_path):
    model, batch = patch_model(sharp_model("llama"), "none"), make_batch("plain")
    path = tmp_path / "new" / "log.jsonl"

    def run(steps: range) -> LogitMonitor:
        monitor = LogitMonitor(every=4, path=path)
        for step in steps:
            with monitor.watch(model, step):
                assert bool(hooks(model)) == (step % 4 == 0)
                model(**batch).loss.backward()
            assert not hooks(model)
        return monitor

    monitor = run(range(10))
    assert [sample.step for sample in read_log(path)] == [0, 4, 8]
    with pytest.raises(RuntimeError, match="stop"), monitor.watch(model, 12):  # noqa: PT012
        model(**batch)
        raise RuntimeError("stop")
    assert not hooks(model)
    assert run(range(8, 14)).file == path  # resumed
    assert [sample.step for sample in read_log(path)] == [0, 4, 8, 12]
    assert [sample.step for sample in read_log(run(range(5)).file)] == [0, 4]
    assert [sample.step for sample in read_log(path)] == [0, 4, 8, 12]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")  # renamed in v6
@pytest.mark.parametrize("reentrant", [False, True])
def test_other_passes_do_not_count(reentrant):
    model, batch = patch_model(sharp_model("llama"), "none").train(), make_batch("plain")
    other = {**batch, "input_ids": batch["input_ids"].flip(1)}
    plain, monitor = LogitMonitor(every=1), LogitMonitor(every=1)
    with plain.watch(model, 1):
        model(**batch).loss.backward()
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with monitor.watch(model, 1):
        with torch.no_grad():
            model(**other)  # an evaluation, or a generation of GRPO's trainer
        model(**batch).loss.backward()
        with torch.no_grad():
            model(**other)  # the next micro-batch
    assert monitor.last == plain.last


def test_watching_changes_nothing():
    batch, losses = make_batch("left"), []
    for every in (1, 2):
        model = patch_model(sharp_model("llama"), "qk_norm_cap")
        with LogitMonitor(every=every).watch(model, 1):
            loss = model(**batch).loss
            loss.backward()
        losses.append((loss, [p.grad for p in model.parameters()]))
    assert torch.equal(losses[0][0], losses[1][0])
    assert all(torch.equal(a, b) for a, b in zip(losses[0][1], losses[1][1], strict=True))


@pytest.mark.parametrize("wrap", ["in place", "wrapped"])
@pytest.mark.costly
def test_compiled_models_run_eagerly_when_they_are_sampled(wrap):
    torch.compiler.reset()
    model, batch = patch_model(sharp_model("llama"), "qk_norm_cap"), make_batch("plain", labels=False)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    plain = LogitMonitor(every=1)
    with plain.watch(model, 1):
        model(**batch, use_cache=False)
    if wrap == "wrapped":
        compiled = torch.compile(model, backend=backend, fullgraph=True)
    else:
        compiled = model
        model.compile(backend=backend, fullgraph=True)
    monitor = LogitMonitor(every=2)
    for step in range(1, 6):
        with monitor.watch(compiled, step):
            compiled(**batch, use_cache=False)
    assert len(graphs) == 1
    assert list(monitor.last.layers.values()) == list(plain.last.layers.values())


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")  # renamed in v6
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gemma4_text", "olmo2", "llama", "deepseek_v3"])
def test_an_unpatched_model_is_sampled_and_trains_the_same(family):
    """Also with gradient checkpointing, which runs the layers again in the backward pass."""
    model, batch = sharp_model(family), make_batch("plain")
    model.gradient_checkpointing_enable()
    plain = training_step(model, batch)
    before = fingerprint(model.train())
    monitor = LogitMonitor(every=1)
    with monitor.watch(model, 1):
        watched = training_step(model, batch)
    assert fingerprint(model) == before
    assert_identical(watched, plain)
    normed = family not in ("llama", "deepseek_v3")
    for layer in monitor.last.layers.values():
        assert layer.grad_q is not None
        assert (layer.bound is not None) == (layer.gain_q is not None) == (layer.gain_k is not None) == normed
        assert layer.bound is None or max(layer.max_logit) <= layer.bound
    assert ("attention/max_gain" in monitor.last.scalars()) == normed
    assert LogitSample.from_line(monitor.last.line().encode()).layers.keys() == monitor.last.layers.keys()


def test_models_that_cannot_be_watched_are_refused(monkeypatch):
    with (
        pytest.raises(ValueError, match="Linear has no attention module of a known family"),
        LogitMonitor(every=1).watch(torch.nn.Linear(2, 2), 1),
    ):
        pass
    model = patch_model(tiny_model("llama"), "none")
    monkeypatch.setattr(type(model), "tp_size", 2)
    with pytest.raises(ValueError, match="tensor-parallel"), LogitMonitor(every=1).watch(model, 1):
        pass
    assert not hooks(model)


def test_samples_cover_all_ranks(process_group, monkeypatch):
    model, batch = patch_model(sharp_model("llama"), "none"), make_batch("plain")
    alone, monitor = LogitMonitor(every=1), LogitMonitor(every=1)
    with alone.watch(model, 1):
        model(**batch)
    reduced = []

    def all_reduce(x, op=torch.distributed.ReduceOp.SUM):  # as if the other rank had the same sums and half the maxima
        reduced.append(op)
        x.copy_(torch.maximum(x, 0.5 * x) if op == torch.distributed.ReduceOp.MAX else x + x)

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    with monitor.watch(model, 1):
        model(**batch)
    assert len(reduced) == 2
    assert monitor.last == alone.last


@pytest.mark.parametrize("wrong", [{"every": 0}, {"rows": 0}, {"limit": -1.0}, {"collapsed": 1.5}])
def test_settings_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LogitMonitor(**wrong)


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
    model, monitor = patch_model(sharp_model("llama"), "none"), LogitMonitor(every=1)
    model.model.layers[0].self_attn.q_proj.weight.data[:16] = float("inf")
    with caplog.at_level(logging.WARNING), monitor.watch(model, 3):
        model(**make_batch("plain"))
    assert "step 3: model.layers.0.self_attn, head 0: |logit| over 100" in caplog.text
    assert monitor.last.worst()[:2] == ("model.layers.0.self_attn", 0)
