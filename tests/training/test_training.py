"""Training a patched model with Trainer and accelerate: loss, resuming, accumulation, checkpointing, precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, PreTrainedModel, set_seed

from hf_qknorm import SCHEMES, patch_model
from qknorm_tests.covering import covering
from qknorm_tests.kneed import knees_of
from qknorm_tests.short_runs import StopAt, assert_equal_weights, counting, losses, trainer
from qknorm_tests.tables import MODEL_TYPES, applies, assert_near, make_batch, randomise, sharp_model
from qknorm_tests.tiny import tiny_model

TRAINED = ("qk_norm_cap", "qkv_norm", "henry", "lp")
RESUMED = [("gpt2", "qk_norm_cap"), ("llama", "qkv_norm")]


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


@pytest.mark.parametrize(("model_type", "preset"), RESUMED)
def test_resuming_gives_the_weights_of_an_uninterrupted_run(model_type, preset, tmp_path):
    def fresh() -> PreTrainedModel:
        return patch_model(tiny_model(model_type), preset)

    whole = trainer(fresh(), tmp_path / "whole")
    whole.train()
    first = trainer(fresh(), tmp_path / "parts", StopAt(4), save_strategy="steps", save_steps=4)
    first.train()
    assert first.state.global_step == 4
    second = trainer(fresh(), tmp_path / "parts", save_strategy="steps", save_steps=4)
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 8
    assert losses(second) == losses(whole)
    assert_equal_weights(second.model, whole.model)
    assert_equal_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "parts" / "checkpoint-8"), whole.model)


def test_knees_load_from_resumed_and_from_best_checkpoints(tmp_path):
    """The knees of the model that Trainer gets do not matter, in bf16 too."""

    def fresh(seed: int) -> PreTrainedModel:
        model = patch_model(tiny_model("llama"), "qk_norm").to(torch.bfloat16)
        return randomise(model, seed, knee=4.0)

    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 4, "bf16": True}
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4, **best}
    expected = knees_of(fresh(0))
    trainer(fresh(0), tmp_path, StopAt(4), **options).train()
    second = trainer(fresh(1), tmp_path, **options)
    assert not any(torch.equal(knee, expected[name]) for name, knee in knees_of(second.model).items())
    second.train(resume_from_checkpoint=True)
    assert second.state.best_model_checkpoint
    for model in (second.model, AutoModelForCausalLM.from_pretrained(second.state.best_model_checkpoint)):
        assert len(knees_of(model)) == 4
        for name, knee in knees_of(model).items():
            assert torch.equal(knee, expected[name])


@pytest.mark.parametrize("model_type", ["llama", "gpt_neox"])
def test_gradient_accumulation(model_type, tmp_path):
    runs = []
    for size, steps in ((16, 1), (4, 4)):
        model = patch_model(sharp_model(model_type), "qk_norm_cap")
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
        run = trainer(model, tmp_path, max_steps=4, optim="sgd", learning_rate=0.1, **sizes)
        run.train()
        runs.append(run)
    torch.testing.assert_close(losses(runs[0]), losses(runs[1]), rtol=0, atol=2e-4)  # logged with four digits
    state = runs[1].model.state_dict()
    for name, value in runs[0].model.state_dict().items():
        assert_near(state[name], value, 1e-5, name)


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


def accelerated(model: PreTrainedModel) -> tuple[Accelerator, Any, Any, DataLoader]:
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return (accelerator, *accelerator.prepare(model, optimizer, DataLoader(counting(), batch_size=16)))


def train_epoch(accelerator: Accelerator, model: Any, optimizer: Any, loader: DataLoader) -> float:
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
    return float(loss.detach())


@pytest.mark.parametrize(("model_type", "preset"), RESUMED)
def test_accelerate_saves_and_loads_its_state(model_type, preset, tmp_path):
    set_seed(0)
    parts = accelerated(patch_model(tiny_model(model_type), preset))
    first = train_epoch(*parts)
    parts[0].save_state(tmp_path)
    expected = train_epoch(*parts)
    assert expected < first

    again = accelerated(patch_model(tiny_model(model_type, seed=1), preset))
    again[0].load_state(tmp_path)
    assert train_epoch(*again) == expected
    assert_equal_weights(again[1], parts[1])
    again[0].unwrap_model(again[1]).save_pretrained(tmp_path / "saved")
    assert_equal_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), parts[1])
