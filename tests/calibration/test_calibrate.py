"""Calibration: gains in closed form, refusals, reports, and conversions of trained models, which keep the loss."""

import logging

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BloomConfig, GPT2Config, LlamaConfig, OPTConfig

from hf_qknorm import Calibration, Scheme, calibrate, patch_model
from hf_qknorm.calibration.calibrate import HELD_OUT
from hf_qknorm.calibration.gains import named_norms
from hf_qknorm.measure.batches import divided
from hf_qknorm.measure.bounds import norm_limits
from hf_qknorm.measure.predictions import evaluate
from hf_qknorm.measure.text import load_text, sample_batches, sequence_length, tokenize
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.install import as_unpatched
from hf_qknorm.model.record import drop_record
from hf_qknorm.ops.reference import head_norm
from hf_qknorm.small_model import byte_tokenizer, mean_loss
from qknorm_tests.covering import covering
from qknorm_tests.seeds import fixed
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
def test_gains_are_the_least_squares_fit_at_any_knee(gains, knee):
    model = patch_model(tiny_model("llama"), GAINS[gains])
    batches = [{"input_ids": tokens(2, 20, seed)} for seed in range(3)]
    calibrate(model, batches, knee=knee)
    tolerance = 1e-4 if knee else 1e-5  # with one, sums are interpolated
    for key, x in norm_inputs(model, batches).items():
        norm = named_norms(model)[key]
        n = head_norm(x, norm.norm, eps=norm.eps, p=norm.p, knee=norm.knee)
        gain = norm.weight.detach().double()
        bias = torch.zeros_like(gain) if norm.bias is None else norm.bias.detach().double()
        residual = gain * n + bias - x
        axes = {2: (0,), 1: (0, 1) if norm.weight.numel() > 1 else (0, 1, 2)}[norm.weight.dim()]
        # at the optimum the residual is orthogonal to the factors of the parameters
        assert ((residual * n).sum(axes).abs() <= tolerance * (n * x).abs().sum(axes)).all()
        if norm.bias is not None:
            assert (residual.sum(axes).abs() <= tolerance * x.abs().sum(axes)).all()


@pytest.mark.parametrize(("q", "side"), [("layer", "q"), (None, "k")])
def test_one_side_takes_the_change_of_the_logits_scale(q, side):
    found = []
    for scale in (None, 2.0):
        model = patch_model(tiny_model("llama"), Scheme(q=q, k="layer", scale=scale))
        calibrate(model, [tokens(2, 20)], knee=0)
        found.append({name: p for name, p in model.named_parameters() if "_norm." in name and "self_attn" in name})
    for name, own in found[0].items():
        factor = model.model.layers[0].self_attn.own_scale / 2 if f".{side}_norm." in name else 1
        torch.testing.assert_close(found[1][name], factor * own, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["henry", "lp"])
def test_a_scalar_gain_includes_queries_keys_and_scale(name):
    model = patch_model(tiny_model("llama"), name)
    batches = [{"input_ids": tokens(2, 20)}]
    calibrate(model, batches, knee=0)
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


def test_sums_add_up_over_batches_and_leave_padding_out():
    """A head of zeros keeps a gain of 1."""
    inputs = tokens(4, 12)
    whole, split = (patch_model(tiny_model("llama"), Scheme(q="rms", k="rms", gain="per_head")) for _ in range(2))
    for model in (whole, split):
        model.model.layers[0].self_attn.k_proj.weight.data[:16] = 0
    calibrate(whole, [inputs], knee=0)
    padded = torch.cat([tokens(2, 5, seed=1), inputs[2:]], dim=1)
    mask = torch.cat([torch.zeros(2, 5), torch.ones(2, 12)], dim=1).long()
    calibrate(split, [{"input_ids": inputs[:2]}, {"input_ids": padded, "attention_mask": mask}], knee=0)
    for name, value in whole.state_dict().items():
        if "_norm." in name and "self_attn" in name:
            torch.testing.assert_close(split.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    assert (whole.model.layers[0].self_attn.k_norm.weight == 1).all(-1).tolist() == [True, False]


@pytest.mark.parametrize(("rows", "knee", "warned"), [(31, None, True), (32, None, False), (31, 4.0, False)])
def test_a_knee_that_few_tokens_judge_is_warned_of(rows, knee, warned, caplog):
    model = patch_model(tiny_model("llama", num_hidden_layers=1), "qk_norm")
    calibrate(model, [tokens(rows, 128)], knee=knee, batch_size=64)
    messages = [record.getMessage() for record in caplog.records if "the knee is chosen" in record.getMessage()]
    assert len(messages) == warned
    assert all("on 1920 tokens, which" in message for message in messages)
    assert all("give 4096 tokens of text or more, in sequences of at least 32" in message for message in messages)


def test_sequences_are_longer_where_positions_are_learned():
    assert sequence_length(LlamaConfig(max_position_embeddings=128)) == 128
    assert sequence_length(LlamaConfig(max_position_embeddings=4096)) == sequence_length(BloomConfig()) == 256
    assert [sequence_length(GPT2Config(n_positions=n)) for n in (1024, 200)] == [512, 200]
    assert sequence_length(OPTConfig(max_position_embeddings=8192)) == 1024


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="is not patched with a scheme: call patch_model"):
        calibrate(tiny_model("llama"), [tokens(2, 8)])
    model = patch_model(tiny_model("llama"), "qk_norm")
    with pytest.raises(ValueError, match="text needs a tokenizer, and this model has no name"):
        calibrate(model, ["text"])
    model.save_pretrained(tmp_path)
    parts = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    places = dict.fromkeys(parts, "cpu") | {"model.layers.1": "disk"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "weights")
    model.register_forward_pre_hook(lambda *_: pytest.fail("a pass before the refusal"))
    with pytest.raises(ValueError, match=r"model.layers.1.self_attn.q_norm are offloaded.*convert_checkpoint"):
        calibrate(model, [tokens(2, 20)])


@pytest.mark.parametrize("scheme", ["qk_norm_cap", "qkv_norm"])
def test_calibration_changes_the_norms_alone_and_leaves_no_attributes_behind_but_the_report(scheme):
    """In bfloat16 too, in which gains stay; a second one gives the same, without dropout."""
    model = patch_model(tiny_model("llama", initializer_range=0.2, attention_dropout=0.5).bfloat16(), scheme).train()
    model.lm_head.weight.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = {name: sorted(vars(module)) for name, module in model.named_modules()}
    data = [tokens(8, 32, seed) for seed in range(12)]
    report = calibrate(model, data, knee=0)
    drop_record(model)
    after = {name: value.clone() for name, value in model.state_dict().items()}
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if name.endswith(("q_norm.weight", "k_norm.weight", "v_norm.weight"))}
    assert {value.dtype for value in after.values()} == {torch.bfloat16}
    assert attributes == {name: sorted(vars(module)) for name, module in model.named_modules()}
    assert model.training
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["lm_head.weight"]
    assert calibrate(model, data, knee=0) == report
    assert all(torch.equal(value, after[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("scheme", ["soft_cap", Scheme(q="rms", k="rms", gain="none")])
def test_a_scheme_without_gains_has_nothing_to_calibrate(scheme):
    model = patch_model(tiny_model("llama"), scheme)
    report = calibrate(model, [tokens(2, 20, seed) for seed in range(4)])
    assert report.loss == report.ones.loss
    assert str(report).startswith("calibrated: loss ")


BASES = {"llama": (1.618, 2.599), "gpt2": (1.614, 2.083)}  # held-out loss before, and with fresh gains of RMS norms
# The batches, and the share of the jump that each knee must remove. None searches: it needs not even 10,000 tokens.
GATES = [("llama", "shared", None, 4, 0.98), ("gpt2", "shared", None, 10, 0.98), ("gpt2", "per_head", 0, 24, 0.59)]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "gain", "knee", "count", "gate"), GATES)
def test_how_much_of_the_jump_is_removed(shared, caplog, family, gain, knee, count, gate):
    folder = shared / "checkpoints" / f"{family}-shakespeare"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    text = load_text(shared / "data" / "tinyshakespeare.txt")
    cut = int(len(text) * 0.9)
    seen, rest = tokenize(tokenizer, text[:cut]), tokenize(tokenizer, text[cut:])
    held_out = sample_batches(rest, 6, 8, 256, seed=fixed(0))
    base, fresh = BASES[family]
    assert mean_loss(model, held_out) == pytest.approx(base, abs=1e-3)
    with caplog.at_level(logging.WARNING, "hf_qknorm"):
        patch_model(model, Scheme(q="auto", k="auto", gain=gain))
    assert "calibrate(model, texts) restores it" in caplog.text
    assert mean_loss(model, held_out) == pytest.approx(fresh, abs=1e-3)
    report = calibrate(model, sample_batches(seen, count, 8, 256, seed=fixed(1)), knee=knee)
    removed = (fresh - mean_loss(model, held_out)) / (fresh - base)
    assert removed >= gate
    reported = (report.ones.loss - report.loss) / (report.ones.loss - report.base.loss)
    assert removed == pytest.approx(reported, abs=0.05)


def made(scheme: str | Scheme) -> Calibration:
    """The report of a small calibration."""
    model = patch_model(tiny_model("llama", initializer_range=0.2), scheme)
    return calibrate(model, [tokens(2, 20, seed) for seed in range(3)], knee=0)


def test_reports_name_hub_repositories_and_no_local_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("a line of text " * 100)
    model = patch_model(tiny_model("llama", vocab_size=300), "qk_norm")
    tokenizer = byte_tokenizer()

    def base() -> str | None:
        return calibrate(model, "corpus.txt", knee=0, tokenizer=tokenizer, max_tokens=256).base_model

    model.name_or_path = "owner/llama"  # not loaded from the Hub: it may be the name of a local folder
    assert base() is None
    model.config._commit_hash = "0" * 40
    assert base() == "owner/llama"
    model.name_or_path = str(tmp_path)
    assert base() is None


@pytest.mark.parametrize(("count", "judged"), [(8, 80), (1, 20)])
def test_reports_count_the_tokens_of_the_evaluation(count, judged):
    report = calibrate(patch_model(tiny_model("llama"), "qk_norm"), [tokens(1, 20, x) for x in range(count)])
    assert (report.tokens, report.judged) == (20 * count, judged)


@pytest.mark.parametrize(
    ("scheme", "knee"), [(Scheme(q="rms", k="rms", gain="per_head"), 0), (Scheme(q="rms", k="rms"), 1.0)]
)
def test_reports_have_statistics_before_and_after_gains_and_bounds(scheme, knee):
    batches = [{"input_ids": tokens(2, 20, seed)} for seed in range(3)]
    model = patch_model(tiny_model("llama", initializer_range=0.2), scheme)
    report = calibrate(model, batches, knee=knee)
    _, judged = divided(batches, *HELD_OUT)
    with as_unpatched(model):
        before = evaluate(model, judged, 50.0, compared=False).after
    after = evaluate(model, judged, 50.0, compared=False).after
    assert list(report.layers) == list(patched_layers(model))
    for name, layer in patched_layers(model).items():
        got = report.layers[name]
        assert got.after == after[name]
        assert got.before.max_logit == before[name].max_logit != got.after.max_logit
        assert got.after.bound == norm_limits(model)[name]["bound"] > max(got.after.max_logit)
        gains = tuple(float(x.weight.detach().abs().max()) for x in (layer.q_norm, layer.k_norm))
        assert (got.after.gain_q, got.after.gain_k) == gains
    assert (report.base.kl, report.base.agreement) == (0, 1)
    assert report.ones.kl > report.chosen.kl > 0
    assert report.scheme == model.config.scheme
    assert report.bound == max(layer.after.bound for layer in report.layers.values())
    assert f"|logit| ≤ {report.bound:.1f} for any input, up to rounding" in str(report)
    sides = {scheme: next(iter(made(scheme).layers.values())).after for scheme in ("qk_norm", "q_norm", "soft_cap")}
    assert [(x.gain_q is None, x.gain_k is None) for x in sides.values()] == [(False,) * 2, (False, True), (True,) * 2]


def test_without_a_language_modelling_head_there_are_no_predictions():
    report = calibrate(patch_model(tiny_model("llama").base_model, "qk_norm"), [tokens(2, 20)], knee=0)
    assert (report.base, report.ones, report.chosen, report.loss, report.kl) == (None,) * 5
    end = (
        f"hidden states change by {report.output_error:.2%}; |logit| ≤ {report.bound:.1f} for any input, up to rounding"
    )
    assert str(report) == f"calibrated: gains from 40 tokens; {end}"
    assert "perplexity" not in report.table()
    assert "layers.0.self_attn" in report.table()
    assert Calibration.from_dict(report.to_dict()) == report


def test_shares_are_relative_to_the_schemes_cap():
    report = made(Scheme(q="rms", k="rms", softcap=2.0))
    assert (report.cap, made("qk_norm").cap) == (2, 50)
    assert any(share > 0 for layer in report.layers.values() for share in layer.before.over_cap)
    assert "> 1 " in report.table()
