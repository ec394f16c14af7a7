"""QuacK against a slow rewriting of its rule, and as an optimiser: schedulers, scalers, saving, the Trainer."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from head_rows import ROWS, attention_layers, outputs_first
from tables import make_batch, sharp_model
from tiny import tiny_model
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from hf_qknorm import QuacK, patch_model

ADAMW = {"lr": 0.2, "weight_decay": 0.1, "eps": 1e-5}  # a smaller eps makes steps of the noise in gradients of zero
OPTIMISERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=3.0, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, **ADAMW, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, **ADAMW, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, **ADAMW, fused=True),
}
CASES = [*((model_type, "adamw") for model_type in ROWS), *(("gpt2", kind) for kind in OPTIMISERS if kind != "adamw")]
STEPS = 4
Norms = dict[str, list[float]]


def made(model_type: str, **settings: Any) -> PreTrainedModel:
    """A model whose logits depend on its queries and keys, without experts, which have no fp64."""
    dense = {"first_k_dense_replace": 2} if model_type == "deepseek_v3" else {}
    return sharp_model(model_type, **dense, **settings)


def train(model: PreTrainedModel, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> None:
    for _ in range(steps):
        model(**make_batch("plain")).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same(model: nn.Module, other: nn.Module) -> None:
    for (name, p), expected in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, expected), name


def by_hand(norms: Norms) -> Norms:
    """The published factors, head by head."""
    if "q" in norms:
        group = len(norms["q"]) // len(norms["k"])
        return {
            "q": [1 / norms["k"][h // group] for h in range(len(norms["q"]))],
            "k": [1 / max(norms["q"][g * group : (g + 1) * group]) for g in range(len(norms["k"]))],
        }
    uq, uk, qr = norms["uq"], norms["uk"], norms["qr"]
    (dkv,), (kr,), (dq,) = norms["dkv"], norms["kr"], norms["dq"]
    largest = max(a * b for a, b in zip(uq, uk, strict=True))
    return {
        "uq": [1 / (dq * k * dkv) for k in uk],
        "uk": [1 / (q * dq * dkv) for q in uq],
        "qr": [1 / (dq * kr)] * len(qr),
        "dq": [min(1 / (largest * dkv), 1 / (max(qr) * kr))],
        "dkv": [1 / (largest * dq)],
        "kr": [1 / (max(qr) * dq)],
    }


class ByHand:
    """The rule as loops over heads, around an optimiser's step."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module, model_type: str, tau: float) -> None:
        self.optimizer, self.rows, self.tau = optimizer, ROWS[model_type], tau
        self.layers = attention_layers(model, model_type)
        self.first = [self.factors(layer) for layer in self.layers]
        self.scales: list[float] = []

    def factors(self, layer: Any) -> Norms:
        return by_hand(
            {
                part: [float(outputs_first(layer, where)[0][rows].double().norm()) for rows in heads]
                for part, (where, heads) in self.rows.items()
            }
        )

    def step(self) -> None:
        now = [self.factors(layer) for layer in self.layers]
        old = [[[p.clone() for p in outputs_first(x, where)] for where, _ in self.rows.values()] for x in self.layers]
        self.optimizer.step()
        for layer, factors, first, before in zip(self.layers, now, self.first, old, strict=True):
            for (part, (where, heads)), was in zip(self.rows.items(), before, strict=True):
                for head, rows in enumerate(heads):
                    scale = self.tau * factors[part][head] / first[part][head]
                    self.scales.append(scale)
                    for p, start in zip(outputs_first(layer, where), was, strict=True):
                        p[rows] = (start[rows] + scale * (p[rows].double() - start[rows].double())).to(p.dtype)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


@pytest.mark.parametrize(("model_type", "kind"), CASES)
@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_steps_are_those_of_the_rule(model_type, kind, tau):
    model, expected, plain = (made(model_type).double() for _ in range(3))
    slow = ByHand(OPTIMISERS[kind](expected.parameters()), expected, model_type, tau)
    train(model, QuacK(OPTIMISERS[kind](model.parameters()), model, tau=tau))
    train(expected, slow)
    train(plain, OPTIMISERS[kind](plain.parameters()))
    assert max(slow.scales) / min(slow.scales) > 1.3
    where = ROWS[model_type]["q" if "q" in ROWS[model_type] else "uq"][0]
    moved = 0.0
    for (name, p), other, without in zip(
        model.named_parameters(), expected.parameters(), plain.parameters(), strict=True
    ):
        torch.testing.assert_close(p, other, rtol=1e-9, atol=1e-9, msg=name)
        moved += float((p - without).detach().norm()) if where in name else 0.0
    assert moved > 0.1


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_it_is_a_learning_rate_of_the_heads_own(kind):
    one_head = {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1}
    model, expected = (sharp_model("llama", **one_head).double() for _ in range(2))
    train(model, QuacK(OPTIMISERS[kind](model.parameters()), model, tau=0.5))
    q, k = (expected.model.layers[0].self_attn.get_submodule(name).weight for name in ("q_proj", "k_proj"))
    rest = [p for p in expected.parameters() if p is not q and p is not k]
    optimizer = OPTIMISERS[kind]([{"params": [q]}, {"params": [k]}, {"params": rest}])
    rate, first = optimizer.param_groups[0]["lr"], (float(k.detach().norm()), float(q.detach().norm()))
    for _ in range(STEPS):
        for group, start, other in zip(optimizer.param_groups, first, (k, q), strict=False):
            group["lr"] = 0.5 * rate * start / float(other.detach().norm())
        train(expected, optimizer, steps=1)
    for (name, p), other in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        torch.testing.assert_close(p, other[1], rtol=1e-9, atol=1e-9, msg=name)


def test_the_first_step_is_the_optimisers_own_to_the_bit():
    model, plain = tiny_model("phi3"), tiny_model("phi3")
    train(model, QuacK(torch.optim.AdamW(model.parameters(), 1e-2), model), steps=1)
    train(plain, torch.optim.AdamW(plain.parameters(), 1e-2), steps=1)
    assert_same(model, plain)


def test_other_weights_are_left_to_the_optimiser():
    model, plain = tiny_model("gpt2"), tiny_model("gpt2")
    train(model, QuacK(torch.optim.AdamW(model.parameters(), 1e-2), model, tau=0.1), steps=1)
    train(plain, torch.optim.AdamW(plain.parameters(), 1e-2), steps=1)
    for (name, p), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        if "c_attn.weight" in name:
            assert torch.equal(p[:, 128:], other[:, 128:])
            assert not torch.equal(p[:, :128], other[:, :128])
        elif "c_attn" not in name:
            assert torch.equal(p, other), name


def test_bfloat16_rounds_once():
    model, expected = (sharp_model("llama").bfloat16() for _ in range(2))
    slow = ByHand(OPTIMISERS["adamw"](expected.parameters()), expected, "llama", tau=0.5)
    train(model, QuacK(OPTIMISERS["adamw"](model.parameters()), model, tau=0.5), steps=1)
    train(expected, slow, steps=1)
    for (name, p), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert float((p != other).float().mean()) < 1e-3, name  # fp32 and fp64 round apart in ties alone


def test_a_frozen_side_keeps_the_other_at_its_own_rate():
    model, plain = tiny_model("llama"), tiny_model("llama")
    for part in (model, plain):
        for layer in part.model.layers:
            layer.self_attn.k_proj.weight.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    train(model, QuacK(torch.optim.AdamW(trained, 1e-2), model))
    train(plain, torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], 1e-2))
    assert_same(model, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3"])
def test_a_saved_state_goes_on_as_if_never_saved(tmp_path, model_type, dtype):
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
    without.load_state_dict(optimizer.optimizer.state_dict())  # nothing of ours stays in the optimiser's own state
    assert all(not str(key).startswith("quack") for entry in optimizer.state.values() for key in entry)


def test_the_state_of_the_optimiser_alone_starts_the_rule_anew():
    model = sharp_model("llama")
    plain = OPTIMISERS["adamw"](model.parameters())
    train(model, plain, steps=2)
    optimizer = QuacK(OPTIMISERS["adamw"](model.parameters()), model)
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))  # torch's optimisers share what they load
    other = copy.deepcopy(model)
    continued = OPTIMISERS["adamw"](other.parameters())
    continued.load_state_dict(copy.deepcopy(plain.state_dict()))
    train(model, optimizer, steps=1)
    train(other, continued, steps=1)
    assert_same(model, other)


def test_it_copies_and_pickles_with_its_model():
    model = sharp_model("llama")
    optimizer = QuacK(OPTIMISERS["adamw"](model.parameters()), model)
    train(model, optimizer, steps=2)
    copied, again = copy.deepcopy((model, optimizer))
    pickled, from_pickle = pickle.loads(pickle.dumps((model, optimizer)))
    for m, o in ((model, optimizer), (copied, again), (pickled, from_pickle)):
        train(m, o, steps=2)
    assert_same(copied, model)
    assert_same(pickled, model)


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


def test_parameters_may_be_added():
    model, plain = sharp_model("llama"), sharp_model("llama")
    for m in (model, plain):
        q = [p for name, p in m.named_parameters() if "q_proj" in name]
        rest = [p for name, p in m.named_parameters() if "q_proj" not in name]
        optimizer = QuacK(torch.optim.SGD(rest, 0.5), m)
        if m is model:
            optimizer.add_param_group({"params": q})
        else:
            optimizer = QuacK(torch.optim.SGD([{"params": rest}, {"params": q}], 0.5), m)
        train(m, optimizer)
    assert_same(model, plain)


class Stop(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def run(model: PreTrainedModel, folder: Any, *callbacks: TrainerCallback, resume: str | None = None) -> QuacK:
    rows = torch.randint(3, 64, (64, 16), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        folder, max_steps=6, per_device_train_batch_size=4, gradient_accumulation_steps=2, save_strategy="no",
        report_to=[], use_cpu=True, disable_tqdm=True, seed=0,
    )  # fmt: skip
    optimizer = QuacK(torch.optim.AdamW(model.parameters(), 3e-2), model, tau=0.5)
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=list(callbacks), optimizers=(optimizer, None))
    trainer.train(resume_from_checkpoint=resume)
    return optimizer


@pytest.mark.parametrize("scheme", [None, "soft_cap"])
def test_the_trainer_resumes_where_it_was(tmp_path, scheme):
    whole, first, second = (tiny_model("llama") for _ in range(3))
    for model in (whole, first, second) if scheme else ():
        patch_model(model, scheme)
    optimizer = run(whole, tmp_path / "whole")
    assert optimizer.param_groups[0]["lr"] < 1e-2  # the schedule reached the wrapped optimiser
    run(first, tmp_path / "parts", Stop(3))
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
