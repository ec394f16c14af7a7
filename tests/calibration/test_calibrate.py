"""Calibration: gains in closed form, and refusals."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, GPT2Config, LlamaConfig, OPTConfig

from hf_qknorm import Scheme, calibrate, patch_model
from hf_qknorm.calibration.gains import named_norms
from hf_qknorm.measure.text import default_length
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.record import drop_record
from hf_qknorm.ops.reference import head_norm
from qknorm_tests.covering import covering
from qknorm_tests.tables import norm_inputs
from qknorm_tests.tables import random_tokens as tokens
from qknorm_tests.tiny import tiny_model

GAINS = {
    "shared": Scheme(q="rms", k="rms", v="rms"),
    "shared, bias": Scheme(q="rms", k="layer", bias=True),
    "per head": Scheme(q="rms", k="lp", p=3, gain="per_head"),
    "per head, bias": Scheme(q="layer", k="layer", gain="per_head"),
    "scalar": Scheme(q="rms", v="l2", gain="scalar"),
}


@pytest.mark.parametrize(("gains", "knee"), covering(GAINS, [0.0, 0.5, 1.7, 32.0], strength=1))
def test_moments_are_the_least_squares_fit_at_any_knee(gains, knee):
    model = patch_model(tiny_model("llama"), GAINS[gains])
    batches = [{"input_ids": tokens(2, 20, seed)} for seed in range(3)]
    calibrate(model, batches, method="moments", knee=knee)
    tolerance = 1e-4 if knee else 1e-5  # with one, sums are interpolated
    for key, x in norm_inputs(model, batches).items():
        norm = named_norms(model)[key]
        n = head_norm(x, norm.norm, eps=norm.eps, p=norm.p, knee=norm.knee)
        gain = norm.weight.detach().double()
        bias = torch.zeros_like(gain) if norm.bias is None else norm.bias.detach().double()
        residual = gain * n + bias - x
        axes = {2: (0,), 1: (0, 1) if norm.weight.numel() > 1 else (0, 1, 2)}[norm.weight.dim()]
        # at the optimum the residual is orthogonal to the factors of the parameters
        scale = (n * x).abs().sum(axes)
        assert ((residual * n).sum(axes).abs() <= tolerance * scale).all()
        if norm.bias is not None:
            assert (residual.sum(axes).abs() <= tolerance * x.abs().sum(axes)).all()


@pytest.mark.parametrize(("q", "side"), [("layer", "q"), (None, "k")])
def test_one_side_takes_the_change_of_the_logits_scale(q, side):
    found = []
    for scale in (None, 2.0):
        model = patch_model(tiny_model("llama"), Scheme(q=q, k="layer", scale=scale))
        calibrate(model, [tokens(2, 20)], method="moments")
        found.append({name: p for name, p in model.named_parameters() if "_norm." in name and "self_attn" in name})
    for name, own in found[0].items():
        factor = model.model.layers[0].self_attn.own_scale / 2 if f".{side}_norm." in name else 1
        torch.testing.assert_close(found[1][name], factor * own, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("rows", "knee", "warned"), [(31, None, True), (32, None, False), (31, 4.0, False)])
def test_a_knee_that_few_tokens_judge_is_warned_of(rows, knee, warned, caplog):
    model = patch_model(tiny_model("llama", num_hidden_layers=1), "qk_norm")
    calibrate(model, [tokens(rows, 128)], knee=knee, batch_size=64)
    messages = [record.getMessage() for record in caplog.records if "the knee is chosen" in record.getMessage()]
    assert len(messages) == warned
    assert all("on 1920 tokens, which" in message for message in messages)
    assert all("give 4096 tokens of text or more, in sequences of at least 32" in message for message in messages)


def test_a_head_of_zeros_keeps_a_gain_of_1():
    model = patch_model(tiny_model("llama"), Scheme(q="rms", k="rms", gain="per_head"))
    layer = next(iter(patched_layers(model).values()))
    layer.k_proj.weight.data[: layer.head_dim] = 0
    calibrate(model, [tokens(2, 20)], method="moments")
    assert (layer.k_norm.weight == 1).all(-1).tolist() == [True, False]


def test_sums_add_up_over_batches_and_leave_padding_out():
    inputs = tokens(4, 12)
    whole = patch_model(tiny_model("llama"), "qk_norm")
    calibrate(whole, [inputs], method="moments")
    split = patch_model(tiny_model("llama"), "qk_norm")
    padded = torch.cat([tokens(2, 5, seed=1), inputs[2:]], dim=1)
    mask = torch.cat([torch.zeros(2, 5), torch.ones(2, 12)], dim=1).long()
    position_free = [{"input_ids": inputs[:2]}, {"input_ids": padded, "attention_mask": mask}]
    calibrate(split, position_free, method="moments")
    for name, value in whole.state_dict().items():
        if "_norm." in name and "self_attn" in name:
            torch.testing.assert_close(split.state_dict()[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["henry", "lp"])
def test_a_scalar_gain_includes_queries_keys_and_scale(name):
    model = patch_model(tiny_model("llama"), name)
    batches = [{"input_ids": tokens(2, 20)}]
    calibrate(model, batches, method="moments")
    projections = norm_inputs(model, batches)
    for layer_name, layer in patched_layers(model).items():
        sides = []
        for name in ("q_norm", "k_norm"):
            x = projections[layer_name, name]
            n = head_norm(x, layer.q_norm.norm, eps=layer.q_norm.eps, p=layer.q_norm.p)
            sides.append((n * x).sum() / (n * n).sum())
        expected = sides[0] * sides[1] * layer.scaling / layer.scheme.scale
        torch.testing.assert_close(layer.q_norm.weight.double().squeeze(), expected, rtol=1e-5, atol=0)
        assert layer.k_norm.weight is None


@pytest.mark.parametrize("knee", [0.0, 4.0])
def test_ones_restores_fresh_gains_and_the_mode(knee):
    model = patch_model(tiny_model("llama", attention_dropout=0.5), "qk_norm_cap").train()
    batches = [tokens(2, 20)]
    first = calibrate(model, batches, method="moments")
    report = calibrate(model, batches, method="ones", knee=knee)
    assert model.training
    assert report.base_loss == first.base_loss  # without dropout
    assert report.knee == pytest.approx(knee, rel=0.1)
    assert (report.loss == report.fresh_loss) == (knee == 0)
    assert all((layer.q_norm.weight == 1).all() for layer in patched_layers(model).values())


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (LlamaConfig(max_position_embeddings=4096), 256),
        (LlamaConfig(max_position_embeddings=128), 128),
        (GPT2Config(n_positions=1024), 512),
        (GPT2Config(n_positions=512), 256),
        (GPT2Config(n_positions=200), 200),
        (OPTConfig(max_position_embeddings=8192), 1024),
        (BloomConfig(), 256),
    ],
)
def test_sequences_are_longer_where_positions_are_learned(config, length):
    assert default_length(config) == length


def test_refusals():
    model = tiny_model("llama")
    batches = [tokens(2, 8)]
    with pytest.raises(ValueError, match="is not patched with a scheme: call patch_model"):
        calibrate(model, batches)
    with pytest.raises(ValueError, match="text needs a tokenizer, and this model has no name"):
        calibrate(patch_model(tiny_model("llama"), "qk_norm"), ["text"])


@pytest.mark.parametrize("method", ["magic", "fit", "fit_qk"])
def test_an_unknown_method_is_refused_with_the_way_out(method):
    with pytest.raises(ValueError, match=rf"'{method}': expected one of ones, moments\. Leave it out .* as knee=16"):
        calibrate(patch_model(tiny_model("llama"), "qk_norm"), [tokens(2, 8)], method=method)


def test_offloaded_gains_are_refused_before_anything_runs(tmp_path):
    patch_model(tiny_model("llama"), "qk_norm").save_pretrained(tmp_path)
    parts = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    places = dict.fromkeys(parts, "cpu") | {"model.layers.1": "disk"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "weights")
    passes = []
    model.register_forward_pre_hook(lambda *_: passes.append(None))
    with pytest.raises(ValueError, match=r"model.layers.1.self_attn.q_norm are offloaded.*convert_checkpoint"):
        calibrate(model, [tokens(2, 20)])
    assert not passes


def test_bf16_gains_stay_bf16():
    model = patch_model(tiny_model("llama").bfloat16(), "qk_norm")
    calibrate(model, [tokens(2, 20)], method="moments")
    gains = [layer.q_norm.weight for layer in patched_layers(model).values()]
    assert all(gain.dtype == torch.bfloat16 and (gain != 1).any() for gain in gains)


@pytest.mark.parametrize("scheme", ["qk_norm_cap", "qkv_norm"])
def test_calibration_changes_the_norms_alone_and_leaves_no_attributes_behind_but_the_report(scheme):
    model = patch_model(tiny_model("llama", initializer_range=0.2), scheme).train()
    model.lm_head.weight.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = {name: sorted(vars(module)) for name, module in model.named_modules()}
    calibrate(model, [tokens(8, 32, seed) for seed in range(12)], method="moments")
    drop_record(model)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if name.endswith(("q_norm.weight", "k_norm.weight", "v_norm.weight"))}
    assert attributes == {name: sorted(vars(module)) for name, module in model.named_modules()}
    assert model.training
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["lm_head.weight"]


@pytest.mark.parametrize("scheme", ["soft_cap", Scheme(q="rms", k="rms", gain="none")])
def test_a_scheme_without_gains_has_nothing_to_calibrate(scheme):
    model = patch_model(tiny_model("llama"), scheme)
    report = calibrate(model, [tokens(2, 20, seed) for seed in range(4)])
    assert report.loss == report.fresh_loss
    assert str(report).startswith("moments: loss ")
