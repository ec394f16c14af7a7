"""LogitMonitor in a Trainer: sampled steps, loggers, and logs of resumed runs."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import TrainerCallback

from hf_qknorm import LogitMonitor, patch_model, unpatch_model
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.training.logit_log import read_log
from qknorm_tests.short_runs import trainer
from qknorm_tests.tables import sharp_model
from qknorm_tests.watched import gradients_by_hand, hooks


class Looker(TrainerCallback):
    """Records the steps with hooks on the model, and the hooks after each; runs after the monitor."""

    def __init__(self):
        self.within, self.left = [], []

    def on_substep_end(self, args, state, control, model, **kwargs):
        if hooks(model):
            self.within.append(state.global_step + 1)

    def on_step_end(self, args, state, control, model, **kwargs):
        self.left += hooks(model)


def trained(folder, monitor, attach=True, **options):
    """A Trainer for 12 steps of 2 micro-batches on a tiny model, and the callback that records hooks."""
    model = patch_model(sharp_model("llama"), "qk_norm_cap")
    settings = {"max_steps": 12, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 3}
    settings |= {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 5}
    looker = Looker()
    run = trainer(model, folder, *([] if attach else [monitor]), **{**settings, **options})
    if attach:
        assert monitor.attach(run) is monitor
    run.add_callback(looker)
    return run, looker


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "olmo2"])
def test_a_model_with_its_own_norms_is_watched_unpatched(tmp_path, family):
    """It trains to the same weights as without the monitor, and its checkpoints are its own."""
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 0.1}
    weights = []
    for watched in (False, True):
        model = sharp_model(family)
        run = trainer(model, tmp_path / str(watched), **settings)
        if watched:
            LogitMonitor(every=2, path=tmp_path / "log.jsonl").attach(run)
        run.train()
        weights.append(model.state_dict())
    assert all(torch.equal(x, weights[0][name]) for name, x in weights[1].items())
    first, last = read_log(tmp_path / "log.jsonl")
    assert all(layer.bound > 0 for sample in (first, last) for layer in sample.layers.values())
    assert first.scalars()["attention/max_gain"] != last.scalars()["attention/max_gain"]
    assert [entry["step"] for entry in run.state.log_history if "attention/max_bound" in entry] == [2, 4]
    config = json.loads((tmp_path / "True" / "checkpoint-2" / "config.json").read_text())
    assert config["model_type"] == family


class Heard(TrainerCallback):
    """A logger, which runs before other callbacks."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs, **kwargs):
        self.logs.append((state.global_step, logs))


@pytest.mark.parametrize("attach", [True, False])
def test_samples_reach_the_trainers_loggers(tmp_path, attach):
    monitor = LogitMonitor(every=3, path=tmp_path / "log.jsonl")
    run, looker = trained(tmp_path / "run", monitor, attach)
    heard = Heard()
    run.callback_handler.callbacks.insert(0, heard)
    run.train()
    samples = read_log(monitor.path)
    assert [sample.step for sample in samples] == [3, 6, 9, 12]
    assert looker.within == [3, 6, 9, 12]
    assert not looker.left
    logged = [entry for entry in run.state.log_history if "attention/max_logit" in entry]
    assert [entry["step"] for entry in logged] == [3, 6, 9, 12]
    for entry, sample in zip(logged, samples, strict=True):
        expected = {**sample.scalars(), "step": sample.step, "epoch": entry["epoch"]}
        assert entry == pytest.approx(expected, rel=1e-4)
    assert [step for step, logs in heard.logs if "attention/max_logit" in logs] == ([3, 6, 9, 12] if attach else [])
    assert [entry["step"] for entry in run.state.log_history if "loss" in entry] == [3, 6, 9, 12]
    assert [entry["step"] for entry in run.state.log_history if "eval_loss" in entry] == [3, 6, 9, 12]


def test_the_trainers_gradients_are_the_optimizers(tmp_path):
    monitor, found = LogitMonitor(every=3), {}
    run, _ = trained(tmp_path, monitor, max_steps=3, max_grad_norm=0.1)

    class Optimizer(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            for name, layer in patched_layers(model).items():
                found[name] = gradients_by_hand("llama", layer)

    run.add_callback(Optimizer())
    run.train()
    for name, (q, k) in found.items():
        layer = monitor.last.layers[name]
        assert layer.grad_q == pytest.approx(q.tolist(), rel=1e-5)
        assert layer.grad_k == pytest.approx(k.tolist(), rel=1e-5)


def test_a_resumed_run_continues_the_log(tmp_path):
    whole = LogitMonitor(every=3, path=tmp_path / "whole.jsonl")
    trained(tmp_path / "whole", whole)[0].train()
    parts = tmp_path / "parts.jsonl"
    trained(tmp_path / "parts", LogitMonitor(every=3, path=parts), max_steps=12)[0].train()
    with parts.open("a") as file:
        file.write('{"format":1,"st')  # from a killed run
    run, _ = trained(tmp_path / "parts", LogitMonitor(every=3, path=parts))
    run.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-5"))
    assert parts.read_text() == whole.path.read_text()
    before = parts.read_text()
    with pytest.raises(FileExistsError, match="holds samples of another run, from step 3 on"):
        trained(tmp_path / "new", LogitMonitor(every=3, path=parts))[0].train()
    assert parts.read_text() == before


class Fails(TrainerCallback):
    """Raises an error once, in a step."""

    def __init__(self, step, error):
        self.step, self.error = step, error

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == self.step and self.error is not None:
            error, self.error = self.error, None
            raise error


def test_a_run_that_starts_again_with_smaller_batches_starts_its_log_again(tmp_path):
    logs = []
    for error in (None, RuntimeError("DefaultCPUAllocator: can't allocate memory")):
        monitor = LogitMonitor(every=2, path=tmp_path / f"{error is None}.jsonl")
        run, _ = trained(tmp_path / "run", monitor, auto_find_batch_size=True, max_steps=6, save_strategy="no")
        run.add_callback(Fails(4, error))
        run.train()
        logs.append([sample.step for sample in read_log(monitor.path)])
    assert logs == [[2, 4, 6]] * 2


def test_a_new_run_after_an_error_leaves_the_log_of_the_other(tmp_path):
    monitor = LogitMonitor(every=2, path=tmp_path / "log.jsonl")
    run, _ = trained(tmp_path / "run", monitor, auto_find_batch_size=True, max_steps=6, save_strategy="no")
    run.add_callback(Fails(4, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        run.train()
    before = monitor.path.read_text()
    with pytest.raises(FileExistsError, match="holds samples of another run, from step 2 on"):
        run.train()
    assert monitor.path.read_text() == before


def test_a_model_is_watched_after_an_error_until_the_monitor_is_closed(tmp_path):
    monitor = LogitMonitor(every=1)
    run, _ = trained(tmp_path, monitor, save_strategy="no")
    model = run.model = unpatch_model(run.model)
    run.add_callback(Fails(0, RuntimeError("an error of the user's")))
    with pytest.raises(RuntimeError, match="of the user's"):
        run.train()
    with pytest.raises(ValueError, match=r"are watched, .* call its close\(\) before"):
        patch_model(model)
    monitor.close()
    assert not hooks(model)
    patch_model(model)
