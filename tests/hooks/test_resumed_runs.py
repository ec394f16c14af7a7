"""A run is resumed with the scheme and the schedule of its checkpoint, or not without a word."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from hf_qknorm import KneeSchedule, Scheme, patch_model
from qknorm_tests.kneed import kneed
from qknorm_tests.short_runs import trainer
from qknorm_tests.tiny import tiny_model
from qknorm_tests.tiny_towers import tiny_towers

RMS, LAYER = Scheme(q="rms", k="rms"), Scheme(q="layer", k="layer", bias=False)  # of the same tensors
SETTINGS = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}


def run(scheme: Scheme | None, folder: Path, resume: str | bool | None = None) -> Any:
    model = tiny_model("llama")
    made = trainer(model if scheme is None else patch_model(model, scheme), folder, **SETTINGS)
    made.train(resume_from_checkpoint=resume)
    return made


@pytest.mark.parametrize(
    ("before", "after", "stored", "own"),
    [
        (RMS, LAYER, "q=rms, k=rms", "q=layer, k=layer, bias=False"),
        (Scheme(softcap=50.0), None, "softcap=50.0", "no scheme"),
        (None, Scheme(softcap=50.0), "no scheme", "softcap=50.0"),
    ],
)
def test_another_scheme_is_refused(before, after, stored, own, tmp_path):
    run(before, tmp_path)
    with pytest.raises(
        ValueError, match=f"checkpoint-1 was trained with {stored}.*, and the model .* has {own}.*: patch"
    ):
        run(after, tmp_path, str(tmp_path / "checkpoint-1"))
    with pytest.raises(ValueError, match="checkpoint-2 was trained with"):
        run(after, tmp_path, True)


def test_the_same_scheme_in_another_part_is_refused(tmp_path):
    trainer(patch_model(tiny_towers("llava"), "soft_cap"), tmp_path, **SETTINGS).train()
    other = trainer(patch_model(tiny_towers("llava"), "soft_cap", tower="vision_tower"), tmp_path, **SETTINGS)
    with pytest.raises(ValueError, match="with softcap=50.0 in qknorm_llama, .* softcap=50.0 in qknorm_clip_vision"):
        other.train(resume_from_checkpoint=True)


@pytest.mark.parametrize(("scheme", "words"), [(RMS, 0), (Scheme(q="rms", k="rms", softcap=9.0), 1)])
def test_another_cap_is_a_warning(scheme, words, tmp_path, caplog):
    run(RMS, tmp_path)
    assert run(scheme, tmp_path, str(tmp_path / "checkpoint-1")).state.global_step == 2
    assert caplog.text.count("q=rms, k=rms, softcap=9.0 in qknorm_llama: the run goes on with another cap") == words


def test_a_model_without_a_scheme_resumes(tmp_path):
    run(None, tmp_path)
    assert run(Scheme(), tmp_path, str(tmp_path / "checkpoint-1")).state.global_step == 2


@pytest.mark.parametrize(("share", "kept", "words"), [(1.0, False, 1), (1.0, True, 0), (0.5, False, 0)])
def test_a_schedule_that_had_not_ended_is_missed(share, kept, words, tmp_path, caplog):
    for callbacks, resume in (([KneeSchedule(share)], None), ([KneeSchedule(share)] * kept, "checkpoint-1")):
        made = trainer(kneed(), tmp_path, *callbacks, **SETTINGS)
        made.train(resume_from_checkpoint=resume and str(tmp_path / resume))
    text = "with KneeSchedule(after=0, share=1, target=0), which had not ended, and this run has none: the knee stays"
    assert caplog.text.count(text) == words


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")  # peft uses the old name
@pytest.mark.parametrize("saved", ["", "loaded", "named"])
@pytest.mark.parametrize(
    ("before", "after", "stored", "own"),
    [
        (None, RMS, "no scheme", "q=rms, k=rms"),
        (RMS, None, "q=rms, k=rms", "no scheme"),
        (RMS, LAYER, "q=rms, k=rms", "q=layer, k=layer, bias=False"),
        (RMS, RMS, "", ""),
    ],
)
def test_another_scheme_below_an_adapter_is_refused(before, after, stored, own, saved, tmp_path):
    """The base model of an adapter is patched in memory, loaded from the folder of a patched model, or named by it."""
    tiny_model("llama").save_pretrained(tmp_path / "base")
    for scheme, resume in ((before, None), (after, str(tmp_path / "checkpoint-1"))):
        model = LlamaForCausalLM.from_pretrained(tmp_path / "base")
        if scheme is not None:
            patch_model(model, scheme)
            if saved:
                model.save_pretrained(tmp_path / "patched" / scheme.q)
                model.name_or_path = str(tmp_path / "patched" / scheme.q)
            if saved == "loaded":
                model = AutoModelForCausalLM.from_pretrained(model.name_or_path)
        made = trainer(get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=2)), tmp_path, **SETTINGS)
        message = f"checkpoint-1 was trained with {stored}.*, and the model .* has {own}"
        with pytest.raises(ValueError, match=message) if resume and own else nullcontext():
            made.train(resume_from_checkpoint=resume)
