"""QuacK scales each head's steps by what the vectors on the other side grew, exactly; it is like other optimisers."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel, TrainerCallback

from hf_qknorm import QuacK
from qknorm_tests.head_rows import ROWS, attention_layers, outputs_first
from qknorm_tests.optimised import OPTIMISERS, made, train
from qknorm_tests.short_runs import SaveAt, trainer
from qknorm_tests.tables import assert_identical, make_batch, sharp_model
from qknorm_tests.tiny import tiny_model

TAU, GROWTH = 0.5, 1000.0
# what grows in the heads of the first group → the parts whose steps shrink there
OTHER = {"k": "q", "q": "k", "uk": "uq", "uq": "uk"}
CASES = [
    *((model_type, "adamw", grown) for model_type, rows in ROWS.items() for grown in OTHER if grown in rows),
    *(("gpt2", kind, "k") for kind in OPTIMISERS if kind != "adamw"),
]


def parts_of(model: Any, model_type: str, parts: list[str]) -> dict[str, list[list[torch.Tensor]]]:
    """By part, the weights and biases of each head in all layers."""
    return {
        part: [
            [p[rows] for layer in attention_layers(model, model_type) for p in outputs_first(layer, where)]
            for rows in heads
        ]
        for part, (where, heads) in ROWS[model_type].items()
        if part in parts
    }


@pytest.mark.parametrize(("model_type", "kind", "grown"), CASES)
@torch.no_grad()
def test_steps_are_scaled_by_head(model_type, kind, grown):
    model = made(model_type).double()
    optimizer = QuacK(OPTIMISERS[kind](model.parameters()), model, tau=TAU)
    with torch.enable_grad():
        model(**make_batch("plain")).loss.backward()
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()  # sees the initial sizes
    shrunk = OTHER[grown]
    parts = parts_of(model, model_type, [grown, shrunk])
    groups = min(len(heads) for heads in parts.values())
    for head in parts[grown][: len(parts[grown]) // groups]:
        for p in head:
            p *= GROWTH
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    before = copy.deepcopy(parts)
    plain_model, plain = copy.deepcopy((model, optimizer.optimizer))
    for p, own in zip(plain_model.parameters(), model.parameters(), strict=True):
        p.grad = own.grad
    optimizer.step()
    plain.step()
    for part, heads in parts_of(plain_model, model_type, [grown, shrunk]).items():
        for number, head in enumerate(heads):
            first = part == shrunk and number < len(heads) // groups
            for p, own, old in zip(head, parts[part][number], before[part][number], strict=True):
                scale = TAU / GROWTH if first else TAU
                torch.testing.assert_close(own, old + scale * (p - old), rtol=1e-9, atol=1e-12)
                assert not torch.equal(p, old)


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
    torch.testing.assert_close(dict(model.named_parameters()), dict(plain.named_parameters()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("model_type", "settings", "dtype"),
    [("llama", {}, torch.bfloat16), ("deepseek_v3", {"first_k_dense_replace": 2}, torch.float32)],
)
def test_a_resumed_trainer_equals_an_uninterrupted_one(tmp_path, model_type, settings, dtype):
    def run(model: PreTrainedModel, *callbacks: TrainerCallback, resume: str | None = None) -> Any:
        optimizer = QuacK(torch.optim.AdamW(model.parameters(), 3e-2), model, tau=0.5)
        options = {"max_steps": 6, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
        trainer(model, tmp_path, *callbacks, optimizers=(optimizer, None), **options).train(
            resume_from_checkpoint=resume
        )
        assert optimizer.param_groups[0]["lr"] < 2e-2  # the scheduler changes the wrapped optimiser
        return model

    whole = run(tiny_model(model_type, **settings).to(dtype))
    run(tiny_model(model_type, **settings).to(dtype), SaveAt(3))
    resumed = run(tiny_model(model_type, seed=1, **settings).to(dtype), resume=str(tmp_path / "checkpoint-3"))
    assert_identical(resumed.state_dict(), whole.state_dict())


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


def test_attached_to_a_trainer_it_wraps_the_optimiser_of_the_arguments(tmp_path):
    settings = {"max_steps": 4, "learning_rate": 3e-2, "adam_beta2": 0.9, "weight_decay": 0.1, "warmup_steps": 2}
    model, plain = tiny_model("llama"), trainer(tiny_model("llama"), tmp_path, **settings)
    run = trainer(model, tmp_path, **settings)
    assert QuacK.attach(run, tau=0.5) is run
    optimizer, expected = run.create_optimizer(), plain.create_optimizer()
    assert isinstance(optimizer, QuacK)
    assert optimizer.tau == 0.5
    assert type(optimizer.optimizer) is type(expected)
    names = {id(p): name for m in (model, plain.model) for name, p in m.named_parameters()}
    groups, wanted = (
        [{**group, "params": [names[id(p)] for p in group["params"]]} for group in found.param_groups]
        for found in (optimizer, expected)
    )
    assert groups == wanted
    run.train()
    assert run.optimizer.optimizer is optimizer  # in accelerate's
    plain.train()
    assert [x["lr"] for x in optimizer.param_groups] == [x["lr"] for x in plain.optimizer.param_groups]
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), plain.model.parameters(), strict=True))
    run.train()  # again, with the same optimiser
    assert run.optimizer.optimizer is optimizer or run.optimizer.optimizer.optimizer is optimizer


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")  # peft uses the old name
def test_attaching_to_a_trainer_that_can_not_have_it_is_refused(tmp_path):
    run = trainer(tiny_model("llama"), tmp_path, max_steps=1)
    with pytest.raises(ValueError, match="tau is -1"):
        QuacK.attach(run, tau=-1)
    QuacK.attach(run)
    with pytest.raises(ValueError, match="has an optimiser: attach QuacK once"):
        QuacK.attach(run)
    run = trainer(tiny_model("llama"), tmp_path, max_steps=1)
    run.train()
    with pytest.raises(ValueError, match="has an optimiser: attach QuacK once"):
        QuacK.attach(run)
    run = trainer(tiny_model("llama"), tmp_path)
    run.is_deepspeed_enabled = True
    with pytest.raises(ValueError, match="does not support DeepSpeed"):
        QuacK.attach(run)
    adapted = get_peft_model(tiny_model("llama"), LoraConfig(task_type="CAUSAL_LM", target_modules=["v_proj"]))
    with pytest.raises(ValueError, match="the AdamW has none of the weights of queries and keys"):
        QuacK.attach(trainer(adapted, tmp_path)).train()


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
    assert_identical(model.state_dict(), other.state_dict())
