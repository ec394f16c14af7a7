"""The report of a calibration stays with the model: saved, loaded, and as it was measured at the conversion."""

import copy
import json
import pickle
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from hf_qknorm import Calibration, calibrate, patch_model, set_knee, unpatch_model
from hf_qknorm.files.names import REPORT
from hf_qknorm.model.record import ATTRIBUTE
from qknorm_tests.adapters import needs_add_adapter
from qknorm_tests.tiny import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")  # peft uses the old name
BATCHES = [torch.randint(3, 64, (2, 24), generator=torch.Generator().manual_seed(i)) for i in range(3)]


def calibrated(family: str = "llama", **options):
    model = patch_model(tiny_model(family), "qk_norm_cap")
    return model, calibrate(model, BATCHES, **options)


def saved(model, folder: Path) -> Calibration:
    model.save_pretrained(folder)
    return Calibration.load(folder / REPORT)


def loaded(folder: Path, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **options)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gpt_neox"])  # two whose stored names differ
def test_the_report_is_saved_and_loaded_with_the_model(tmp_path, family):
    model, report = calibrated(family)
    assert saved(model, tmp_path / "first") == report
    assert saved(loaded(tmp_path / "first"), tmp_path / "second") == report


@pytest.mark.parametrize("keep", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_keep_the_report(tmp_path, keep):
    model, report = calibrated()
    assert saved(keep(model), tmp_path) == report


def trained(model):
    model(input_ids=BATCHES[0], labels=BATCHES[0]).loss.backward()
    torch.optim.SGD(model.parameters(), lr=1e-4).step()
    return model


def knee_lowered(model):
    set_knee(model, 2.0)
    return model


@pytest.mark.parametrize("change", [trained, knee_lowered])
def test_the_report_of_the_conversion_stays_as_it_was_measured(tmp_path, change):
    model, report = calibrated(knee=4)
    assert saved(change(model), tmp_path / "first") == report
    assert saved(loaded(tmp_path / "first"), tmp_path / "second") == report


def test_without_a_calibration_no_report_stays_in_the_folder(tmp_path):
    model, _ = calibrated()
    model.save_pretrained(tmp_path)
    patch_model(unpatch_model(model), "qk_norm").save_pretrained(tmp_path)
    assert not (tmp_path / REPORT).exists()
    assert not hasattr(loaded(tmp_path), ATTRIBUTE)


def test_a_save_on_another_rank_writes_no_report(tmp_path):
    calibrated()[0].save_pretrained(tmp_path, is_main_process=False)
    assert not (tmp_path / REPORT).exists()


@pytest.mark.parametrize("text", ["", '{"scheme": 3}', None], ids=["empty", "malformed", "of another scheme"])
def test_a_report_that_does_not_belong_to_the_model_is_left_out_with_a_warning(tmp_path, text, caplog):
    calibrated()[0].save_pretrained(tmp_path)
    stored = json.loads((tmp_path / REPORT).read_text())
    stored["scheme"]["softcap"] = 7.0
    (tmp_path / REPORT).write_text(json.dumps(stored) if text is None else text)
    assert not hasattr(loaded(tmp_path), ATTRIBUTE)
    assert str(tmp_path / REPORT) in caplog.text


@needs_add_adapter
def test_an_adapter_is_saved_without_the_report(tmp_path):
    model, _ = calibrated()
    model.add_adapter(LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(tmp_path)
    assert not (tmp_path / REPORT).exists()


def test_a_failed_calibration_leaves_the_report(tmp_path):
    model, report = calibrated()
    with pytest.raises(ValueError, match="max_loss_increase"):
        calibrate(model, BATCHES, knee=0, max_loss_increase=-1.0)
    assert saved(model, tmp_path) == report
