"""LogitMonitor in a Trainer: sampled steps, loggers, and logs of resumed runs."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback

from hf_qknorm import LogitMonitor, patch_model, unpatch_model
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.training.logit_log import LogitSample, read_log
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


def test_a_model_with_its_own_norms_is_watched_unpatched(tmp_path):
    """It trains to the same weights as without the monitor, and its checkpoints are its own."""
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 0.1}
    weights = []
    for watched in (False, True):
        model = sharp_model("qwen3")
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
    assert config["model_type"] == "qwen3"


class Printer(TrainerCallback):
    """Hears what the Trainer logs, before other callbacks."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs, **kwargs):
        self.logs += [(state.global_step, key) for key in logs if key.startswith("attention/")]


class Logger(Printer, TensorBoardCallback):
    """Hears what a logger of `report_to` does."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.tb_writer = None


@pytest.mark.parametrize("attach", [True, False])
def test_samples_reach_the_trainers_loggers(tmp_path, attach):
    """The console and the history have three numbers of each; loggers have all, with `attach`."""
    monitor = LogitMonitor(every=3, path=tmp_path / "log.jsonl")
    run, looker = trained(tmp_path / "run", monitor, attach)
    printer, heard = Printer(), Logger()
    run.callback_handler.callbacks[:0] = [printer, heard]
    run.train()
    samples = read_log(monitor.path)
    assert [sample.step for sample in samples] == [3, 6, 9, 12]
    assert looker.within == [3, 6, 9, 12]
    assert not looker.left
    logged = [entry for entry in run.state.log_history if "attention/max_logit" in entry]
    for entry, sample in zip(logged, samples, strict=True):
        assert entry == pytest.approx({**sample.summary(), "step": sample.step, "epoch": entry["epoch"]}, rel=1e-4)
    kinds = (LogitSample.summary, LogitSample.scalars)
    short, full = ([(sample.step, key) for sample in samples for key in numbers(sample)] for numbers in kinds)
    assert sorted(printer.logs) == (sorted(short) if attach else [])
    assert sorted(heard.logs) == (sorted(full) if attach else [])
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


def test_a_resumed_run_continues_the_log_and_another_writes_beside_it(tmp_path, caplog):
    """Also a second run by one monitor, as the trials of a search are."""
    whole = LogitMonitor(every=3, path=tmp_path / "whole.jsonl")
    trained(tmp_path / "whole", whole)[0].train()
    parts = tmp_path / "parts.jsonl"
    trained(tmp_path / "parts", LogitMonitor(every=3, path=parts), max_steps=12)[0].train()
    with parts.open("a") as file:
        file.write('{"format":1,"st')  # from a killed run
    run, _ = trained(tmp_path / "parts", LogitMonitor(every=3, path=parts))
    assert not caplog.records
    run.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-5"))
    assert read_log(parts) == read_log(whole.path)
    before = parts.read_text()
    monitor = LogitMonitor(every=3, path=parts)
    run, _ = trained(tmp_path / "new", monitor, max_steps=3)
    for number in (2, 3):
        caplog.clear()
        run.train()
        assert [record.getMessage() for record in caplog.records if "LogitMonitor" in record.getMessage()] == [
            f"LogitMonitor: {parts} has samples of another run, and this run's go to {tmp_path}/parts-{number}.jsonl"
        ]
        assert [sample.step for sample in read_log(monitor.file)] == [3]
    assert parts.read_text() == before


class Fails(TrainerCallback):
    """Raises an error once, in a step."""

    def __init__(self, step, error):
        self.step, self.error = step, error

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == self.step and self.error is not None:
            error, self.error = self.error, None
            raise error


def test_a_run_that_starts_again_with_smaller_batches_has_a_log_of_its_own(tmp_path):
    monitor = LogitMonitor(every=2, path=tmp_path / "log.jsonl")
    run, _ = trained(tmp_path / "run", monitor, auto_find_batch_size=True, max_steps=6, save_strategy="no")
    run.add_callback(Fails(4, RuntimeError("DefaultCPUAllocator: can't allocate memory")))
    run.train()
    steps = [[sample.step for sample in read_log(path)] for path in (monitor.path, monitor.file)]
    assert steps == [[2, 4], [2, 4, 6]]


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
