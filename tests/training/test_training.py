"""Training a patched model with Trainer: loss, resuming, gradient checkpointing."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_qknorm import SCHEMES, patch_model
from qknorm_tests.covering import covering
from qknorm_tests.kneed import knees_of
from qknorm_tests.short_runs import SaveAt, losses, trainer
from qknorm_tests.tables import MODEL_TYPES, applies, assert_identical, make_batch, randomise, sharp_model
from qknorm_tests.tiny import tiny_model

TRAINED = ("qk_norm_cap", "henry")


@pytest.mark.parametrize("preset", TRAINED)
def test_the_loss_goes_down(preset, tmp_path):
    model = patch_model(tiny_model("llama"), preset)
    before = {name: p.clone() for name, p in model.named_parameters()}
    run = trainer(model, tmp_path, max_steps=30)
    run.train()
    history = losses(run)
    assert history[0] > 3.5
    assert sum(history[-3:]) / 3 < 0.6 * history[0]
    for name, parameter in model.named_parameters():
        assert "_norm." not in name or not torch.equal(parameter, before[name]), f"{name} learnt nothing"


@pytest.mark.parametrize(("model_type", "preset"), [("gpt2", "qk_norm_cap"), ("llama", "qkv_norm")])
def test_resuming_gives_the_weights_of_an_uninterrupted_run(model_type, preset, tmp_path):
    def fresh() -> PreTrainedModel:
        return patch_model(tiny_model(model_type), preset)

    whole = trainer(fresh(), tmp_path / "whole")
    whole.train()
    trainer(fresh(), tmp_path / "parts", SaveAt(4)).train()
    second = trainer(fresh(), tmp_path / "parts", save_strategy="steps", save_steps=8)
    second.train(resume_from_checkpoint=True)
    assert losses(second) == losses(whole)
    assert_identical(second.model.state_dict(), whole.model.state_dict())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "parts" / "checkpoint-8")
    assert_identical(loaded.state_dict(), whole.model.state_dict())


def test_knees_load_from_resumed_and_from_best_checkpoints(tmp_path):
    """The knees of the model that Trainer gets do not matter, in bf16 too."""

    def fresh(seed: int) -> PreTrainedModel:
        return randomise(patch_model(tiny_model("llama"), "qk_norm").to(torch.bfloat16), seed, knee=4.0)

    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 4, "bf16": True}
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4, **best}
    expected = knees_of(fresh(0))
    trainer(fresh(0), tmp_path, SaveAt(4), **options).train()
    second = trainer(fresh(1), tmp_path, **options)
    assert not any(torch.equal(knee, expected[name]) for name, knee in knees_of(second.model).items())
    second.train(resume_from_checkpoint=True)
    for model in (second.model, AutoModelForCausalLM.from_pretrained(second.state.best_model_checkpoint)):
        assert all(torch.equal(knee, expected[name]) for name, knee in knees_of(model).items())


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")  # renamed in v6
@pytest.mark.parametrize(
    ("model_type", "reentrant"), [*covering(MODEL_TYPES, [False, True], strength=1), ("llama", True), ("gpt2", False)]
)
def test_gradient_checkpointing_recomputes_the_same(model_type, reentrant):
    """With dropout, the kernels' seed is from the generator that checkpointing restores."""
    preset = "qk_norm_cap" if applies(model_type, SCHEMES["qk_norm_cap"]) else "soft_cap"
    settings = {} if model_type == "gpt2" else {"attention_dropout": 0.2}
    model = randomise(patch_model(sharp_model(model_type, **settings), preset))
    model.train()
    batch = make_batch("left")

    def gradients() -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(0)
        model(**batch).loss.backward()
        return [p.grad for p in model.parameters()]

    plain = gradients()
    torch.manual_seed(1)
    assert not torch.equal(model(**batch).logits, model(**batch).logits), "dropout is there"
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    for recomputed, kept in zip(gradients(), plain, strict=True):
        assert torch.equal(recomputed, kept)
