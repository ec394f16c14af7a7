"""The learned temperature: its start, Swin v2's formula, kernels' form, bounds, decay, adapters and checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tables import as_loaded, assert_near, make_batch, randomise, sharp_model
from transformers import AutoModelForCausalLM, Swinv2Config, Trainer, TrainingArguments
from transformers.models.swinv2.modeling_swinv2 import Swinv2SelfAttention

import hf_qknorm as qk
from hf_qknorm import SCHEMES, Scheme, patch_model, unpatch_model
from hf_qknorm.model.attention import head_biases, patched_layers
from hf_qknorm.model.head_bias import scaled_norm
from hf_qknorm.ops import reference
from hf_qknorm.ops.types import Norm
from hf_qknorm.stats.bounds import logit_bounds

ALONE = Scheme(temperature="learned")
NORMED = Scheme(q="rms", k="rms", temperature="learned")


def logits(model: Any, kind: str = "left") -> torch.Tensor:
    with torch.no_grad():
        return model(**make_batch(kind, labels=False)).logits


def set_temperatures(model: Any, value: float) -> None:
    for layer in patched_layers(model).values():
        torch.nn.init.constant_(layer.temperature.bias, value)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "opt", "qwen3", "hunyuan_v1_dense", "deepseek_v3", "gpt_oss"])
def test_it_starts_at_the_model_without_it_and_then_scales_the_logits(model_type):
    model = sharp_model(model_type).eval()
    before = logits(model)
    patch_model(model, ALONE)
    assert torch.equal(logits(model), before)
    set_temperatures(model, 0.7)
    found = logits(model)
    assert (found - before).abs().max() > 1e-3
    set_temperatures(model, 0.0)
    own = {name: layer.own_scale for name, layer in patched_layers(model).items()}
    scaled = patch_model(unpatch_model(model), Scheme(scale=next(iter(own.values())) * 2.0137527074704766))
    assert_near(found, logits(scaled), 1e-5)


def test_norms_and_temperature_start_as_norms_alone():
    plain, with_it = (patch_model(sharp_model("llama"), scheme).eval() for scheme in (SCHEMES["qk_norm"], NORMED))
    assert torch.equal(logits(plain), logits(with_it))


def test_it_is_swin_v2s_logit_scale_below_its_clamp():
    """τ of Swin v2 is exp(logit_scale), at most 100, on unit vectors; a scheme's scale of 10 is its start."""
    theirs = Swinv2SelfAttention(Swinv2Config(), dim=32, num_heads=4, window_size=(4, 4)).eval()
    with torch.no_grad():
        theirs.logit_scale += torch.tensor([-1.0, 0.0, 0.5, 1.5]).view(4, 1, 1)
        x = torch.randn(1, 16, 32, generator=torch.Generator().manual_seed(0))
        q, k, v = (part(x).view(1, 16, 4, 8).transpose(1, 2) for part in (theirs.query, theirs.key, theirs.value))
        place = theirs.continuous_position_bias_mlp(theirs.relative_coords_table).view(-1, 4)
        place = place[theirs.relative_position_index.view(-1)].view(16, 16, 4).permute(2, 0, 1)
        factor = (theirs.logit_scale.flatten() - torch.tensor(10.0).log()).exp()
        norm = scaled_norm(Norm("l2", eps=1e-24), factor, 8)
        q, k = reference.norm_rope_one(q, norm, None), reference.norm_rope_one(k, Norm("l2", eps=1e-24), None)
        mask = 16 * torch.sigmoid(place)[None]
        found = reference.attention(q, k, v, scale=10.0, mask=mask)
        out = theirs(x, output_attentions=True)
    torch.testing.assert_close(found.weights, out[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gain", [None, torch.randn(8), torch.randn(3, 8), torch.randn(1)])
@pytest.mark.parametrize("bias", [None, torch.randn(8)])
def test_it_folds_into_a_norm(gain, bias):
    x, factor = torch.randn(2, 3, 5, 8), torch.rand(3) + 0.5
    norm = Norm("rms", gain, bias)
    expected = reference.norm_rope_one(x, norm, None) * factor[:, None, None]
    torch.testing.assert_close(reference.norm_rope_one(x, scaled_norm(norm, factor, 8), None), expected)


@pytest.mark.parametrize("scheme", [NORMED, replace(NORMED, gain="none"), replace(NORMED, k=None)])
def test_the_bound_has_it(scheme):
    model = patch_model(sharp_model("llama"), scheme)
    before = logit_bounds(model)
    for layer in patched_layers(model).values():
        layer.temperature.bias.data.copy_(torch.tensor([-3.0, 0.0, 1.0, 0.5]))
    for name, bound in logit_bounds(model).items():
        assert bound is before[name] is None or bound == pytest.approx(before[name] * 2.718281828)


def test_weight_decay_leaves_it_out_and_gradients_reach_it(tmp_path):
    model = patch_model(sharp_model("llama"), NORMED)
    trainer = Trainer(model, TrainingArguments(tmp_path, report_to=[], use_cpu=True))
    decayed = set(trainer.get_decay_parameter_names(model))
    own = {f"{name}.temperature.bias" for name in patched_layers(model)}
    assert own <= dict(model.named_parameters()).keys() - decayed
    model(**make_batch("plain")).loss.backward()
    for layer in patched_layers(model).values():
        assert (layer.temperature.bias.grad != 0).all()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")  # peft uses the old name
def test_an_adapter_trains_it():
    model = patch_model(sharp_model("llama"), NORMED)
    names = qk.peft_modules_to_save(model)
    assert names == ["k_norm", "q_norm", "temperature"]
    before = logits(model)
    peft = get_peft_model(model, LoraConfig(modules_to_save=names, target_modules=["v_proj"]))
    layer = next(iter(patched_layers(model).values()))
    copy = head_biases(layer)["temperature"]
    assert copy.bias.requires_grad
    copy.bias.data.fill_(1.0)
    assert (logits(peft) - before).abs().max() > 1e-3
    with peft.disable_adapter():
        assert torch.equal(logits(peft), before)


def test_a_checkpoint_keeps_it_and_a_lost_one_is_refused(tmp_path):
    model = as_loaded(randomise(patch_model(sharp_model("llama"), ALONE))).eval()
    model.save_pretrained(tmp_path / "with")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "with").eval()
    assert torch.equal(logits(loaded), logits(model))
    state = model.state_dict()
    lost = state.pop("model.layers.0.self_attn.temperature.bias")
    assert lost.shape == (4,)
    model.save_pretrained(tmp_path / "without", state_dict=state)
    with pytest.raises(ValueError, match="missing from the weights, first .*temperature.bias"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "without")
    with pytest.raises(ValueError, match="in the weights but not in the scheme, first .*temperature.bias"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "with", qk_norm=Scheme(softcap=5.0))


def test_a_converted_checkpoint_has_it(tmp_path):
    model = sharp_model("llama").eval()
    model.save_pretrained(tmp_path / "base")
    qk.convert_checkpoint(tmp_path / "base", tmp_path / "converted", scheme=ALONE)
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "converted").eval()
    assert torch.equal(logits(converted), logits(model))
    assert len([name for name in converted.state_dict() if name.endswith("temperature.bias")]) == 2


@pytest.mark.parametrize("value", ["fixed", True, 1.0])
def test_impossible_values(value):
    with pytest.raises(ValueError, match=r'Scheme\(temperature=.*"learned" or None'):
        Scheme(temperature=value)
