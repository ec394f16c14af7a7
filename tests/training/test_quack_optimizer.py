"""QuacK as an optimiser: saving, copying, schedulers, scalers, closures, the Trainer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel, TrainerCallback

from hf_qknorm import QuacK, patch_model
from qknorm_tests.optimised import OPTIMISERS, assert_same, train
from qknorm_tests.short_runs import SaveAt, trainer
from qknorm_tests.tables import make_batch, sharp_model
from qknorm_tests.tiny import tiny_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3"])
def test_training_from_a_saved_state_equals_uninterrupted_training(tmp_path, model_type, dtype):
    whole = sharp_model(model_type).to(dtype)
    optimizer = QuacK(OPTIMISERS["adamw"](whole.parameters()), whole, tau=0.5)
    train(whole, optimizer, steps=2)
    torch.save((whole.state_dict(), optimizer.state_dict()), tmp_path / "state.pt")
    weights, state = torch.load(tmp_path / "state.pt", weights_only=True)
    train(whole, optimizer, steps=2)
    resumed = sharp_model(model_type, seed=1).to(dtype)
    again = QuacK(OPTIMISERS["adamw"](resumed.parameters()), resumed, tau=0.5)
    resumed.load_state_dict(weights)
    again.load_state_dict(state)
    train(resumed, again, steps=2)
    assert_same(resumed, whole)
    without = OPTIMISERS["adamw"](sharp_model(model_type).parameters())
    without.load_state_dict(optimizer.optimizer.state_dict())  # the wrapped optimiser's state has no initial norms
    assert all(not str(key).startswith("quack") for entry in optimizer.state.values() for key in entry)


def test_schedulers_scalers_closures_and_hooks():
    model, plain = sharp_model("llama"), sharp_model("llama")
    optimizer = QuacK(torch.optim.SGD(model.parameters(), 0.5), model)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=4)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    seen: list[Any] = []
    handle = optimizer.register_step_post_hook(lambda o, *_: seen.append(o))
    for _ in range(2):
        scaler.scale(model(**make_batch("plain")).loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
    handle.remove()
    assert seen == [optimizer, optimizer]
    assert optimizer.param_groups[0]["lr"] == 0.25 == optimizer.optimizer.param_groups[0]["lr"]
    closed = QuacK(torch.optim.SGD(plain.parameters(), 0.5), plain)
    for rate in (0.5, 0.375):
        closed.param_groups[0]["lr"] = rate

        def closure() -> torch.Tensor:
            closed.zero_grad()
            loss = plain(**make_batch("plain")).loss
            loss.backward()
            return loss

        assert closed.step(closure).item() > 0
    for (name, p), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, other, rtol=1e-5, atol=1e-6, msg=name)


def test_a_step_that_the_scaler_skips_changes_nothing():
    model = sharp_model("llama")
    before = copy.deepcopy(model)
    optimizer = QuacK(torch.optim.SGD(model.parameters(), 0.5), model)
    scaler = torch.amp.GradScaler("cpu")
    (scaler.scale(model(**make_batch("plain")).loss) * torch.inf).backward()
    scaler.step(optimizer)
    assert_same(model, before)


def run(model: PreTrainedModel, folder: Path, *callbacks: TrainerCallback, resume: str | None = None) -> QuacK:
    optimizer = QuacK(torch.optim.AdamW(model.parameters(), 3e-2), model, tau=0.5)
    options = {"max_steps": 6, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    made = trainer(model, folder, *callbacks, optimizers=(optimizer, None), **options)
    made.train(resume_from_checkpoint=resume)
    return optimizer


@pytest.mark.parametrize("scheme", [None, "soft_cap"])
def test_a_resumed_trainer_equals_an_uninterrupted_one(tmp_path, scheme):
    whole, first, second = (tiny_model("llama") for _ in range(3))
    for model in (whole, first, second) if scheme else ():
        patch_model(model, scheme)
    optimizer = run(whole, tmp_path / "whole")
    assert optimizer.param_groups[0]["lr"] < 1e-2  # the scheduler changes the wrapped optimiser
    run(first, tmp_path / "parts", SaveAt(3))
    run(second, tmp_path / "parts", resume=str(tmp_path / "parts" / "checkpoint-3"))
    assert_same(second, whole)


def test_refusals():
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="tau is 0, expected a finite number > 0"):
        QuacK(torch.optim.SGD(model.parameters(), 0.1), model, tau=0)
    with pytest.raises(ValueError, match="the SGD has none of the weights of queries and keys"):
        QuacK(torch.optim.SGD(model.lm_head.parameters(), 0.1), model)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[16:32] = 0
    optimizer = QuacK(torch.optim.SGD(model.parameters(), 0.1), model)
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn: the weights 'k' of head 1 are all zero"):
        optimizer.step()


SETTINGS = {
    "adamw": {"learning_rate": 3e-2, "adam_beta2": 0.9, "weight_decay": 0.1, "lr_scheduler_type": "cosine"},
    "sgd": {"optim": "sgd", "learning_rate": 0.5, "warmup_steps": 2},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_attached_to_a_trainer_it_wraps_the_optimiser_of_the_arguments(tmp_path, settings):
    settings = {"max_steps": 4} | settings
    plain = trainer(tiny_model("llama"), tmp_path, **settings)
    expected = plain.create_optimizer()
    model = tiny_model("llama")
    run = trainer(model, tmp_path, **settings)
    assert QuacK.attach(run, tau=0.5) is run
    optimizer = run.create_optimizer()
    assert isinstance(optimizer, QuacK)
    assert optimizer.tau == 0.5
    assert type(optimizer.optimizer) is type(expected)
    names = {id(p): name for m in (model, plain.model) for name, p in m.named_parameters()}
    groups, wanted = (
        [{**group, "params": [names[id(p)] for p in group["params"]]} for group in found.param_groups]
        for found in (optimizer, expected)
    )
    assert groups == wanted
    assert [group["weight_decay"] for group in groups] == [settings.get("weight_decay", 0.0), 0.0]
    run.train()
    assert run.optimizer.optimizer is optimizer  # in accelerate's
    rates = [group["lr"] for group in optimizer.param_groups]
    plain.train()
    assert rates == [group["lr"] for group in plain.optimizer.param_groups]
    moved = (p for p, q in zip(model.parameters(), plain.model.parameters(), strict=True) if not torch.equal(p, q))
    assert any(True for _ in moved)
    run.train()  # again, with the same optimiser
    assert run.optimizer.optimizer is optimizer or run.optimizer.optimizer.optimizer is optimizer


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")  # peft uses the old name
def test_attaching_to_a_trainer_that_can_not_have_it_is_refused(tmp_path):
    run = trainer(tiny_model("llama"), tmp_path, max_steps=1)
    with pytest.raises(ValueError, match="tau is -1"):
        QuacK.attach(run, tau=-1)
    run.train()
    with pytest.raises(ValueError, match="has trained or has QuacK already"):
        QuacK.attach(run)
    run = QuacK.attach(trainer(tiny_model("llama"), tmp_path))
    with pytest.raises(ValueError, match="has trained or has QuacK already"):
        QuacK.attach(run)
    run.is_deepspeed_enabled = True
    with pytest.raises(ValueError, match="does not support DeepSpeed"):
        QuacK.attach(run)
    adapted = get_peft_model(tiny_model("llama"), LoraConfig(task_type="CAUSAL_LM", target_modules=["v_proj"]))
    run = trainer(adapted, tmp_path)
    with pytest.raises(ValueError, match="no weight of queries and keys is trained"):
        QuacK.attach(run)
    assert run.create_optimizer.__name__ == "create_optimizer"


def test_a_state_without_initial_norms_measures_them_anew():
    model = sharp_model("llama")
    plain = OPTIMISERS["adamw"](model.parameters())
    train(model, plain, steps=2)
    optimizer = QuacK(OPTIMISERS["adamw"](model.parameters()), model)
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))  # torch's optimisers keep references to a loaded state
    other = copy.deepcopy(model)
    continued = OPTIMISERS["adamw"](other.parameters())
    continued.load_state_dict(copy.deepcopy(plain.state_dict()))
    train(model, optimizer, steps=1)
    train(other, continued, steps=1)
    assert_same(model, other)
