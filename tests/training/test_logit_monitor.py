"""LogitMonitor: its numbers, steps and warnings, a clean model between samples, and its use in a Trainer."""

import json
import logging
import math
import pickle

import pytest
import torch
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback

from hf_qknorm import LogitMonitor, QuacK, logit_statistics, patch_model
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.reports.logit_log import LogitSample, read_log
from qknorm_tests.short_runs import trainer
from qknorm_tests.slow import slow_but
from qknorm_tests.tables import assert_identical, fingerprint, hooks, make_batch, randomise, sharp_model
from qknorm_tests.tables import step as training_step
from qknorm_tests.tiny import tiny_model


@pytest.mark.parametrize(("family", "kind"), [("llama", "left"), ("gpt2", "plain"), ("qwen3", "right")])
def test_a_sample_has_the_statistics_of_the_first_rows(family, kind):
    model = randomise(patch_model(sharp_model(family), "soft_cap" if family == "qwen3" else "qk_norm_cap"))
    batch = make_batch(kind)
    monitor = LogitMonitor(every=1, rows=1)
    with monitor.watch(model, 1):
        model(**batch)
    with torch.no_grad(), logit_statistics(model) as statistics:
        model(**{name: rows[:1] for name, rows in batch.items()})
    assert list(monitor.last.layers) == list(statistics) == list(patched_layers(model))
    for name, expected in statistics.items():
        layer = monitor.last.layers[name]
        for field in ("max_logit", "entropy", "over_half", "over_cap", "even"):
            torch.testing.assert_close(torch.tensor(getattr(layer, field)), getattr(expected, field).float())
        assert layer.cap == 50


def test_a_bare_loop_samples_every_nth_step(tmp_path, monkeypatch):
    model, batch = patch_model(sharp_model("llama"), "none"), make_batch("plain")
    path = tmp_path / "new" / "log.jsonl"
    for steps in (range(10), range(6, 14)):  # the second time resumed
        monkeypatch.chdir(tmp_path)
        monitor = LogitMonitor(every=4, path="new/log.jsonl")
        monkeypatch.chdir(tmp_path.parent)
        for step in steps:
            with monitor.watch(model, step):
                assert bool(hooks(model)) == (step % 4 == 0)
                model(**batch).loss.backward()
            assert not hooks(model)
        assert [sample.step for sample in read_log(path)] == list(range(0, max(steps) + 1, 4))
    with pytest.raises(RuntimeError, match="stop"), monitor.watch(model, 12):  # noqa: PT012
        model(**batch)
        raise RuntimeError("stop")
    assert not hooks(model)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")  # renamed in v6
@pytest.mark.parametrize("reentrant", [False, True])
def test_other_passes_do_not_count(reentrant):
    model, batch = patch_model(sharp_model("llama"), "none").train(), make_batch("plain")
    other = {**batch, "input_ids": batch["input_ids"].flip(1)}
    plain, monitor = LogitMonitor(every=1), LogitMonitor(every=1)
    with plain.watch(model, 1):
        model(**batch).loss.backward()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with monitor.watch(model, 1):
        with torch.no_grad():
            model(**other)  # an evaluation, or a generation of GRPO's trainer
        model(**batch).loss.backward()
        model(**other).loss.backward()  # the next micro-batch
    assert monitor.last == plain.last


@pytest.mark.parametrize("wrap", slow_but(["in place"], ["in place", "wrapped"]))
@pytest.mark.costly
def test_compiled_models_run_eagerly_when_they_are_sampled(wrap):
    torch.compiler.reset()
    model = patch_model(sharp_model("llama", num_hidden_layers=1), "qk_norm_cap")
    batch, graphs = make_batch("plain", labels=False), []

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
    for step in range(1, 4):
        with monitor.watch(compiled, step):
            compiled(**batch, use_cache=False)
    assert len(graphs) == 1
    assert list(monitor.last.layers.values()) == list(plain.last.layers.values())


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")  # renamed in v6
@pytest.mark.parametrize("family", ["qwen3", "gemma4_text", "olmo2", "deepseek_v3"])
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
    normed = family != "deepseek_v3"
    for layer in monitor.last.layers.values():
        assert (layer.bound is not None) == (layer.gain_q is not None) == (layer.gain_k is not None) == normed
        assert layer.bound is None or max(layer.max_logit) <= layer.bound
    assert ("attention/max_gain_q" in monitor.last.scalars()) == normed
    assert LogitSample.from_line(monitor.last.line()).layers.keys() == monitor.last.layers.keys()


def test_refusals(monkeypatch):
    for wrong in ({"every": 0}, {"every": math.nan}, {"rows": 0}, {"limit": -1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            LogitMonitor(**wrong)
    for attach in (LogitMonitor().attach, QuacK.attach):
        with pytest.raises(TypeError, match="attach takes a Trainer, got Linear"):
            attach(torch.nn.Linear(2, 2))
    unknown, model = torch.nn.Linear(2, 2), patch_model(tiny_model("llama"), "none")
    monkeypatch.setattr(type(model), "tp_size", 2)
    for refused, message in ((unknown, "Linear has no attention module of a known family"), (model, "tensor-parallel")):
        with pytest.raises(ValueError, match=message), LogitMonitor(every=1).watch(refused, 1):
            pass
    assert not hooks(model)


def test_warns_of_heads_over_the_limit_once_until_they_recover(caplog):
    model, batch = patch_model(sharp_model("llama"), "none"), make_batch("plain")
    monitor = LogitMonitor(every=1)
    weight = patched_layers(model)["model.layers.1.self_attn"].q_proj.weight.data
    before, warnings = weight.clone(), []
    for step, factors in enumerate([(1, 1), (200, 1), (200, 400), (200, 400), (1, 1), (200, math.inf)]):
        for head, factor in zip((0, 2), factors, strict=True):
            rows = slice(16 * head, 16 * head + 16)
            weight[rows] = before[rows] * factor
        caplog.clear()
        with caplog.at_level(logging.WARNING), monitor.watch(model, step):
            model(**batch)
        warnings.append([record.getMessage() for record in caplog.records])
        if step == 2:
            layer = monitor.last.layers["model.layers.1.self_attn"]
            numbers = layer.max_logit[2], layer.entropy[2]
    assert [len(lines) for lines in warnings] == [0, 1, 1, 0, 0, 1]
    assert warnings[1][0].startswith("step 1: |logit| over 100 in 1 heads, up to ")
    where = "{:.4g} (model.layers.1.self_attn, head 2, entropy {:.3g} nats)"
    assert warnings[2] == ["step 2: |logit| over 100 in 1 heads, up to " + where.format(*numbers)]
    assert "over 100 in 2 heads, up to nan (model.layers.1.self_attn, head 2" in warnings[5][0]
    with LogitMonitor(every=1, limit=1e-3).watch(model, 9):  # a limit of one's own
        model(**batch)
    assert "step 9: |logit| over 0.001 in 8 heads" in caplog.text


def trained(folder, monitor, attach=True, **options):
    """A Trainer for 12 steps of 2 micro-batches on a tiny model."""
    model = sharp_model("qwen3")  # has norms of its own, and is not patched
    settings = {"max_steps": 12, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 3}
    settings |= {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 5}
    run = trainer(model, folder, *([] if attach else [monitor]), **{**settings, **options})
    if attach:
        assert monitor.attach(run) is monitor
    return run


class Heard(TrainerCallback):
    """Hears what the Trainer logs, before other callbacks, and finds hooks on the model after each step."""

    def __init__(self):
        self.logs, self.left = [], []

    def on_log(self, args, state, control, logs, **kwargs):
        self.logs += [(state.global_step, key) for key in logs if key.startswith("attention/")]

    def on_step_end(self, args, state, control, model, **kwargs):
        self.left += hooks(model)


class Logger(Heard, TensorBoardCallback):
    """Hears what a logger of `report_to` does."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.tb_writer = None


@pytest.mark.parametrize("attach", [True, False])
def test_samples_reach_the_trainers_loggers(tmp_path, attach):
    """The console and the history have three numbers of each; loggers have all, with `attach`."""
    monitor = LogitMonitor(every=3, path=tmp_path / "log.jsonl")
    run = trained(tmp_path / "run", monitor, attach)
    printer, logger, last = Heard(), Logger(), Heard()
    run.callback_handler.callbacks[:0] = [printer, logger]
    run.add_callback(last)
    run.train()
    samples = read_log(monitor.path)
    assert [sample.step for sample in samples] == [3, 6, 9, 12]
    assert not last.left
    logged = [entry for entry in run.state.log_history if "attention/max_logit" in entry]
    for entry, sample in zip(logged, samples, strict=True):
        assert entry == pytest.approx({**sample.summary(), "step": sample.step, "epoch": entry["epoch"]}, rel=1e-4)
    kinds = (LogitSample.summary, LogitSample.scalars)
    short, full = ([(sample.step, key) for sample in samples for key in numbers(sample)] for numbers in kinds)
    assert sorted(printer.logs) == (sorted(short) if attach else [])
    assert sorted(logger.logs) == (sorted(full) if attach else [])
    assert [entry["step"] for entry in run.state.log_history if "loss" in entry] == [3, 6, 9, 12]
    assert [entry["step"] for entry in run.state.log_history if "eval_loss" in entry] == [3, 6, 9, 12]
    assert all("attention/max_bound" in entry for entry in logged)
    assert json.loads((tmp_path / "run" / "checkpoint-5" / "config.json").read_text())["model_type"] == "qwen3"


def test_a_resumed_run_continues_the_log(tmp_path):
    """After an end between two checkpoints, in the middle of a line."""
    whole, parts = (tmp_path / f"{name}.jsonl" for name in ("whole", "parts"))
    trained(tmp_path / "run", LogitMonitor(every=3, path=whole)).train()
    parts.write_text(whole.read_text()[:-100])
    run = trained(tmp_path / "run", LogitMonitor(every=3, path=parts))
    run.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-5"))
    assert read_log(parts) == read_log(whole)


def test_a_model_is_watched_after_an_error_until_the_monitor_is_closed(tmp_path):
    monitor = LogitMonitor(every=1)
    run = trained(tmp_path, monitor, save_strategy="no")
    model = run.model
    hook = model.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.train()
    hook.remove()
    assert pickle.dumps(model)
    with pytest.raises(ValueError, match=r"are watched, .* call its close\(\) before"):
        patch_model(model, "soft_cap")
    monitor.close()
    assert not hooks(model)
    patch_model(model, "soft_cap")
