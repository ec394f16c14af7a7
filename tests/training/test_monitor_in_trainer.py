"""LogitMonitor in a Trainer: sampled steps, loggers, and logs of resumed runs."""

import json
import pickle

import pytest
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback

from hf_qknorm import LogitMonitor, patch_model
from hf_qknorm.training.logit_log import LogitSample, read_log
from qknorm_tests.short_runs import trainer
from qknorm_tests.tables import sharp_model
from qknorm_tests.watched import hooks


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
