"""MuonClip: torch's Muon and AdamW by hand on the same parameters, QK-Clip after them, and the Trainer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from hf_qknorm import FAMILIES, MuonClip, QKClip, patch_model
from hf_qknorm.model.attention import patched_layers
from qknorm_tests.muon_by_hand import MATRICES, ByHand
from qknorm_tests.tables import make_batch, sharp_model, swept
from qknorm_tests.tiny import tiny_model

RATE, DECAY = 0.02, 0.1
SHARED = ("zamba", "zamba2")  # layers share the weights of their attention, which would be clipped twice


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Sweep over one family of each style, or with `--all-families` over all with a language model."""
    if "swept_type" in metafunc.fixturenames:
        metafunc.parametrize("swept_type", [name for name in swept(metafunc.config) if name not in SHARED])


def settings(**options: object) -> TrainingArguments:
    """Arguments of a Trainer with the rate and decay of this file."""
    fixed = {"learning_rate": RATE, "weight_decay": DECAY, "use_cpu": True, "report_to": [], "disable_tqdm": True}
    return TrainingArguments(**{**fixed, **options})


def train(model: PreTrainedModel, *optimizers: object, steps: int = 3) -> None:
    model.train()
    for _ in range(steps):
        torch.manual_seed(0)
        model(**make_batch("plain"), use_cache=False).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        optimizers[0].zero_grad()


def assert_same(model: nn.Module, other: nn.Module) -> None:
    weights = other.state_dict()
    for name, x in model.state_dict().items():
        torch.testing.assert_close(
            x, weights[name], rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("model_type", MATRICES)
def test_a_step_is_torchs_muon_and_adamw_by_hand(model_type):
    model = sharp_model(model_type)
    other, start = copy.deepcopy(model), copy.deepcopy(model)
    given = settings(adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-3)
    optimizer = MuonClip(model, given, threshold=None, momentum=0.9)
    train(model, optimizer)
    assert not optimizer.muon.state, "the matrices of a step are not kept"
    by_hand = ByHand(other, given, momentum=0.9)
    train(other, by_hand)
    assert_same(model, other)
    moved = [name for name, x in model.state_dict().items() if not torch.equal(x, start.state_dict()[name])]
    assert set(moved) >= set(by_hand.matrices)
    counts = [len(group["params"]) for group in optimizer.param_groups]
    assert sum(counts) == len(list(model.parameters()))
    assert counts[0] == len(by_hand.matrices)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "deepseek_v3"])
def test_heads_are_clipped_after_the_step(model_type):
    model = patch_model(sharp_model(model_type), "none")
    other = copy.deepcopy(model)
    train(model, MuonClip(model, settings(), threshold=1.0))
    clipped = copy.deepcopy(other)
    train(other, MuonClip(other, settings(), threshold=None), QKClip(other, 1.0))
    assert_same(model, other)
    train(clipped, MuonClip(clipped, settings(), threshold=None))
    assert any(not torch.equal(x, clipped.state_dict()[name]) for name, x in model.state_dict().items())


class Seen(TrainerCallback):
    """The learning rates of all groups after each step."""

    def __init__(self) -> None:
        self.rates = []

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        self.rates.append({group["lr"] for group in optimizer.param_groups})


def trainer(folder, model, *, own=False, callbacks=(), **options) -> Trainer:
    """A Trainer with MuonClip, which it makes itself if `own`."""
    rows = [{"input_ids": row, "labels": row} for row in make_batch("plain")["input_ids"].repeat(8, 1)]
    fixed = {"max_steps": 6, "per_device_train_batch_size": 2, "save_steps": 3, "seed": 0, "logging_steps": 1}
    arguments = settings(output_dir=str(folder), **{**fixed, **options})
    if own:
        given = {"optimizer_cls_and_kwargs": (lambda: MuonClip, {"arguments": arguments, "threshold": 2.0})}
    else:
        given = {"optimizers": (MuonClip(model, arguments, threshold=2.0), None)}
    return Trainer(model, arguments, train_dataset=rows, callbacks=list(callbacks), **given)


def test_the_trainers_schedule_sets_every_rate(tmp_path):
    seen = Seen()
    model = sharp_model("llama")
    run = trainer(tmp_path, model, callbacks=[seen], lr_scheduler_type="linear", warmup_steps=2)
    assert [group["weight_decay"] for group in run.optimizer.param_groups] == [DECAY, DECAY, 0.0]
    run.train()
    expected = [RATE * share for share in (0.5, 1.0, 0.75, 0.5, 0.25, 0.0)]
    assert all(len(rates) == 1 for rates in seen.rates)
    assert [next(iter(rates)) for rates in seen.rates] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("model_type", "own"), [("llama", True), ("gpt2", False)])
def test_a_run_continues_from_its_checkpoint(tmp_path, model_type, own):
    options = {"own": own, "gradient_accumulation_steps": 2}
    whole = sharp_model(model_type)
    trainer(tmp_path, whole, **options).train()
    resumed = sharp_model(model_type, seed=1)
    trainer(tmp_path, resumed, **options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_same(resumed, whole)


def test_a_saved_state_continues_with_its_experts(tmp_path):
    whole, resumed = sharp_model("mixtral"), sharp_model("mixtral", seed=1)
    optimizer, again = MuonClip(whole, settings()), MuonClip(resumed, settings())
    train(whole, optimizer)
    torch.save((whole.state_dict(), optimizer.state_dict()), tmp_path / "state.pt")
    train(whole, optimizer)
    weights, state = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed.load_state_dict(weights)
    again.load_state_dict(state)
    train(resumed, again)
    assert_same(resumed, whole)


def test_frozen_and_tied_weights():
    model = tiny_model("llama", tie_word_embeddings=True)
    model.model.layers[0].requires_grad_(False)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = MuonClip(model, settings())
    muon, *others = optimizer.param_groups
    assert len(muon["params"]) == 7
    assert sum(p is model.lm_head.weight for group in others for p in group["params"]) == 1
    optimizer.step()  # nothing has a gradient
    train(model, optimizer, steps=1)
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)


def test_models_with_norms_train_with_muon_alone():
    model = sharp_model("gemma4_text")
    with pytest.raises(ValueError, match=r"norms both its queries and its keys.*\(in MuonClip: threshold=None\)"):
        MuonClip(model, settings())
    train(model, MuonClip(model, settings(), threshold=None), steps=1)


@pytest.mark.parametrize(("model_type", "threshold"), [("llama", -1.0), ("qwen3", 100.0)])
def test_a_model_that_is_refused_stays_as_it_is(model_type, threshold):
    model = tiny_model(model_type)
    kind, name = type(model), model.name_or_path
    with pytest.raises(ValueError, match="threshold"):
        MuonClip(model, settings(), threshold=threshold)
    assert not patched_layers(model)
    assert (type(model), model.name_or_path, type(model.name_or_path)) == (kind, name, str)


def test_refusals():
    model = tiny_model("llama")
    with pytest.raises(TypeError, match="takes a transformers PreTrainedModel, got Linear"):
        MuonClip(nn.Linear(2, 2), settings())
    arguments = settings()
    arguments.deepspeed = "zero2.json"
    with pytest.raises(ValueError, match="does not support DeepSpeed"):
        MuonClip(model, arguments)
    for layer in model.model.layers:
        layer.requires_grad_(False)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no trainable linear layer"):
        MuonClip(model, settings())


def test_it_steps_and_clips_in_every_family(swept_type, tmp_path):
    """Models with norms of their own take no threshold."""
    model = sharp_model(swept_type)
    threshold = None if FAMILIES[swept_type].own_norms else 1e-2
    optimizer = MuonClip(model, TrainingArguments(str(tmp_path), learning_rate=1e-3, use_cpu=True), threshold)
    model(input_ids=make_batch("plain")["input_ids"])[0].float().square().mean().backward()
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    after = dict(model.named_parameters())
    assert all(after[name].isfinite().all() for name in before)
    assert any(group["use_muon"] for group in optimizer.param_groups)
    moved = [name for name in before if not torch.equal(after[name], before[name])]
    assert len(moved) > len(before) / 2
    assert bool(optimizer.clipped) == (threshold is not None)
    assert all((factors < 1).any() for factors in optimizer.clipped.values())


def test_a_step_that_the_scaler_skips_changes_nothing():
    model = patch_model(sharp_model("llama"), "none")
    before = copy.deepcopy(model)
    optimizer, scaler = MuonClip(model, settings(), threshold=1.0), torch.amp.GradScaler("cpu")
    (scaler.scale(model(**make_batch("plain")).loss) * torch.inf).backward()
    scaler.step(optimizer)
    assert_same(model, before)
