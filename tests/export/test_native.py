"""Exports to transformers' own models have the same logits, also without the package installed, or are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from hf_qknorm import FAMILIES, SCHEMES, Scheme, export_native, patch_model, set_knee, unpatch_model
from hf_qknorm.export.targets import TARGETS
from hf_qknorm.model.derived import derived_model
from hf_qknorm.model.norms import HeadNorm
from qknorm_tests.children import child
from qknorm_tests.tables import MODEL_TYPES, as_loaded, assert_near, make_batch, randomise, real, sharp_model

TOLERANCE = 1e-5
RMS = Scheme(q="rms", k="rms")
LAYER = Scheme(q="layer", k="layer", eps=1e-5)
EPS = {"rms_norm_eps": 1e-6}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip

# Model type, settings, scheme, and the model type of the export.
CASES: dict[str, tuple[str, dict[str, Any], Scheme, str]] = {
    "llama": ("llama", EPS, RMS, "qwen3"),
    "llama-tied": ("llama", EPS | {"tie_word_embeddings": True}, RMS, "qwen3"),
    "llama-wide-heads": ("llama", EPS | {"head_dim": 32}, RMS, "qwen3"),
    "llama-bias": ("llama", EPS | {"attention_bias": True}, RMS, "qwen3"),
    "llama-another-activation": ("llama", EPS | {"hidden_act": "gelu"}, RMS, "qwen3"),
    "llama-yarn": ("llama", EPS | {"rope_parameters": YARN}, RMS, "qwen3"),
    "llama-llama3": ("llama", EPS | {"rope_parameters": LLAMA3}, RMS, "qwen3"),
    "llama-another-eps": ("llama", {"rms_norm_eps": 1e-3, "attention_bias": True}, RMS, "qwen3"),
    "llama-another-scale": ("llama", EPS, Scheme(q="rms", k="rms", scale=0.3), "qwen3"),
    "llama-without-gain": ("llama", EPS, Scheme(q="rms", k="rms", gain="none"), "qwen3"),
    "llama-scalar-gain": ("llama", EPS, Scheme(q="rms", k="rms", gain="scalar"), "qwen3"),
    "llama-l2-and-rms": ("llama", EPS, Scheme(q="l2", k="rms"), "qwen3"),
    "llama-henry": ("llama", EPS, SCHEMES["henry"], "qwen3"),
    "llama-henry-wide-heads": ("llama", EPS | {"head_dim": 32}, SCHEMES["henry"], "qwen3"),
    "llama-lp-of-order-2": ("llama", EPS, Scheme(q="lp", k="lp", gain="scalar", scale=1.0), "qwen3"),
    "mistral": ("mistral", {"sliding_window": None} | EPS, RMS, "qwen3"),
    "mistral-window": ("mistral", EPS, RMS, "qwen3"),
    "qwen2": ("qwen2", {"use_sliding_window": False} | EPS, RMS, "qwen3"),
    "qwen2-window": ("qwen2", EPS, RMS, "qwen3"),
    "phi3": ("phi3", EPS, RMS, "qwen3"),
    "mixtral": ("mixtral", {"sliding_window": None} | EPS, RMS, "qwen3_moe"),
    "mixtral-window": ("mixtral", EPS, RMS, "qwen3_moe"),
    "llama-ended-knee": ("llama", EPS, RMS, "qwen3"),
    "llama-knee": ("llama", EPS | {"attention_bias": True}, RMS, "qwen3"),
    "llama-knee-l2": ("llama", EPS, Scheme(q="l2", k="rms"), "qwen3"),
    "phi3-knee": ("phi3", {"sliding_window": None} | EPS, RMS, "qwen3"),
    "mixtral-knee": ("mixtral", EPS, RMS, "qwen3_moe"),
    "gpt_neox-knee": ("gpt_neox", {}, LAYER, "phi"),
    "llama-scale": ("llama", {}, Scheme(scale=0.3), "llama"),
    "gpt_neox": ("gpt_neox", {}, LAYER, "phi"),
    "gpt_neox-tied": ("gpt_neox", {"tie_word_embeddings": True}, LAYER, "phi"),
    "gpt_neox-without-bias": ("gpt_neox", {"attention_bias": False}, Scheme(q="layer", k="layer", bias=False), "phi"),
    "gpt_neox-scale": ("gpt_neox", {}, Scheme(q="layer", k="layer", scale=0.3), "phi"),
    "llama-cap": ("llama", {}, Scheme(softcap=2.0), "vaultgemma"),
    "llama-cap-tied": ("llama", {"tie_word_embeddings": True}, Scheme(softcap=2.0, scale=0.3), "vaultgemma"),
    "mistral-cap": ("mistral", {}, Scheme(softcap=2.0), "vaultgemma"),
    "qwen2-cap": ("qwen2", {}, Scheme(softcap=2.0), "vaultgemma"),
    "phi3-cap": ("phi3", {"hidden_size": 96, "initializer_range": 0.1}, Scheme(softcap=2.0), "vaultgemma"),
    "gemma2-cap": ("gemma2", {}, Scheme(softcap=2.0), "gemma2"),
    "gemma2-scale": (
        "gemma2", {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 40}, Scheme(scale=0.3), "gemma2",
    ),
    **{f"{model_type}-none": (model_type, {}, SCHEMES["none"], model_type) for model_type in MODEL_TYPES},
}  # fmt: skip


@torch.no_grad()
def save_patched(
    folder: Path, model_type: str, settings: dict[str, Any], scheme: Scheme | str, *, knee: float = 0.0,
    sharpness: float = 1.0, ended: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """Save a patched model with random gains, also of the unpatched norms, and perhaps with a knee."""
    model = as_loaded(
        randomise(patch_model(sharp_model(model_type, **settings), scheme), knee=knee, sharpness=sharpness)
    )
    if ended:
        set_knee(model, 0.0)
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if type(module).__name__.endswith("Norm") and not isinstance(module, HeadNorm):
            for parameter in module.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.save_pretrained(folder, **options)
    return model


@torch.no_grad()
def logits(model: Any, kind: str = "left") -> Tensor:
    """The logits of the tokens that are no padding, whose own differ between models."""
    batch = make_batch(kind, labels=False)
    return model(**batch).logits[real(batch)]


@pytest.mark.parametrize("case", CASES)
def test_an_export_computes_the_same(tmp_path, case):
    model_type, settings, scheme, target = CASES[case]
    knee = {"knee": 4.0, "ended": "ended" in case} if "knee" in case else {}
    patched = save_patched(tmp_path / "ours", model_type, settings, scheme, **knee)
    if FAMILIES[model_type].own_cap:  # older transformers drop Gemma 2's own cap by default
        patched.set_attn_implementation("eager")
    report = export_native(tmp_path / "ours", tmp_path / "theirs")
    native, info = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert not any(info.values()), "no tensor is missing or unexpected"
    assert (native.config.model_type, report.model_type) == (target, target)
    assert type(native).__module__.startswith("transformers.")
    assert report.architecture == type(native).__name__ == native.config.architectures[0]
    assert "qk_norm" not in (tmp_path / "theirs/config.json").read_text()
    for kind in ("plain", "left"):
        assert_near(logits(native, kind), logits(patched, kind), TOLERANCE)
    batch = make_batch("left", labels=False)
    generate = {"max_new_tokens": 8, "do_sample": False, "use_cache": True}
    assert torch.equal(native.generate(**batch, **generate), patched.generate(**batch, **generate))
    if scheme != SCHEMES["none"]:
        unpatched = logits(unpatch_model(patched), "plain")
        assert (logits(native, "plain") - unpatched).abs().max() > 0.01, "the comparison can fail"


LOAD = """
import json, sys, torch
from transformers import AutoModelForCausalLM
tokens = torch.tensor(json.loads(sys.argv[1]))
for folder in sys.argv[2:]:
    with torch.no_grad():
        torch.save(AutoModelForCausalLM.from_pretrained(folder)(tokens).logits, f"{folder}/logits.pt")
assert "hf_qknorm" not in sys.modules
"""


@pytest.mark.costly
def test_plain_transformers_loads_it(tmp_path):
    tokens = make_batch("plain")["input_ids"]
    expected = {}
    for case in ("llama", "gpt_neox", "gemma2-cap"):
        patched = save_patched(tmp_path / f"{case}-ours", *CASES[case][:3])
        export_native(tmp_path / f"{case}-ours", tmp_path / case)
        expected[case] = patched(tokens).logits.detach()
    folders = [str(tmp_path / case) for case in expected]
    child(LOAD, json.dumps(tokens.tolist()), *folders, home=tmp_path)
    for case, ours in expected.items():
        assert_near(torch.load(tmp_path / case / "logits.pt"), ours, TOLERANCE, case)


def test_every_target_is_tested():
    tested = {(model_type, target) for model_type, _, _, target in CASES.values()}
    assert {(model_type, t.model_type) for model_type, targets in TARGETS.items() for t in targets} <= tested


@pytest.mark.parametrize("case", ["llama", "phi3", "mixtral", "gpt_neox", "llama-cap-tied", "gemma2-cap"])
def test_shards_are_read(tmp_path, case):
    patched = save_patched(tmp_path / "ours", *CASES[case][:3], max_shard_size="60KB")
    export_native(tmp_path / "ours", tmp_path / "theirs")
    native = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    assert_near(logits(native, "plain"), logits(patched, "plain"), TOLERANCE)


@pytest.mark.parametrize("case", ["llama", "llama-henry", "llama-scalar-gain", "qwen2", "phi3", "mixtral"])
def test_bfloat16_stays_as_it_is(tmp_path, case):
    """If no tensor is rounded again, logits are equal; √16 is a power of two."""
    model_type, settings, scheme, _ = CASES[case]
    patched = save_patched(tmp_path / "first", model_type, settings, scheme)
    patched.to(torch.bfloat16).save_pretrained(tmp_path / "ours")
    export_native(tmp_path / "ours", tmp_path / "theirs")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").dtype == torch.bfloat16
    patched, native = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32) for name in ("ours", "theirs")
    )
    assert_near(logits(native, "plain"), logits(patched, "plain"), TOLERANCE)


def test_a_classifier_without_a_scheme_is_exported(tmp_path):
    config = as_loaded(patch_model(sharp_model("llama"), "none")).config
    model = derived_model(type(AutoModelForSequenceClassification.from_config(config)).base_class)(config).eval()
    model.save_pretrained(tmp_path / "ours")
    assert export_native(tmp_path / "ours", tmp_path / "theirs").architecture == "LlamaForSequenceClassification"
    native = AutoModelForSequenceClassification.from_pretrained(tmp_path / "theirs")
    tokens = make_batch("plain")["input_ids"][:1]
    torch.testing.assert_close(native(tokens).logits, model(tokens).logits, rtol=0, atol=0)


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_the_scale_of_a_model_without_a_head_is_exported(tmp_path, model_type):
    """Its tensors are stored without the prefix of the base model."""
    model = as_loaded(patch_model(AutoModel.from_config(sharp_model(model_type).config), Scheme(scale=0.9)))
    model.eval().save_pretrained(tmp_path / "ours")
    export_native(tmp_path / "ours", tmp_path / "theirs")
    native = AutoModel.from_pretrained(tmp_path / "theirs")
    tokens = make_batch("plain")["input_ids"]
    assert_near(native(tokens)[0], model(tokens)[0], TOLERANCE)


def test_an_existing_destination_is_kept(tmp_path):
    patched = save_patched(tmp_path / "ours", *CASES["llama"][:3])
    target = tmp_path / "theirs"
    target.mkdir()
    (target / "notes.txt").write_text('{"model_type": "llama"}')
    for overwrite, message in ((False, "exists and is not empty"), (True, r"holds no config\.json")):
        with pytest.raises(FileExistsError, match=message):
            export_native(tmp_path / "ours", target, overwrite=overwrite)
    (target / "notes.txt").rename(target / "config.json")
    with pytest.raises(FileExistsError, match="exists and is not empty"):
        export_native(tmp_path / "ours", target)
    assert [path.name for path in target.iterdir()] == ["config.json"]
    export_native(tmp_path / "ours", target, overwrite=True)
    native = AutoModelForCausalLM.from_pretrained(target)
    assert_near(logits(native, "plain"), logits(patched, "plain"), TOLERANCE)


def test_a_trained_model_with_its_tokenizer(tmp_path, shared):
    source = shared / "checkpoints/llama-shakespeare"
    model = AutoModelForCausalLM.from_pretrained(source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = "{{ messages }}"
    randomise(patch_model(model, "qk_norm"))
    model.save_pretrained(tmp_path / "ours")
    tokenizer.save_pretrained(tmp_path / "ours")
    for name in ("LICENSE", "README.md", "modeling_qknorm.py"):
        (tmp_path / "ours" / name).write_text("as you like")
    report = export_native(tmp_path / "ours", tmp_path / "theirs")
    assert str(report).endswith("Qwen3ForCausalLM, which transformers loads without hf_qknorm")
    native = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    again = AutoTokenizer.from_pretrained(tmp_path / "theirs")
    assert again.chat_template == tokenizer.chat_template
    assert (tmp_path / "theirs/LICENSE").read_text() == "as you like"
    assert not any((tmp_path / "theirs" / name).exists() for name in ("README.md", "modeling_qknorm.py"))
    assert native.generation_config.eos_token_id == model.generation_config.eos_token_id
    tokens = again("ROMEO: But soft, what light through yonder window breaks?", return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(native(**tokens).logits, model(**tokens).logits)
    assert torch.equal(native.generate(**tokens, max_new_tokens=20), model.generate(**tokens, max_new_tokens=20))


def test_unchanged_tensors_are_equal(tmp_path):
    """A Llama's tensors, gains included, are those of Qwen 3."""
    save_patched(tmp_path / "ours", *CASES["llama"][:3])
    export_native(tmp_path / "ours", tmp_path / "theirs")
    ours, theirs = (tmp_path / name / "model.safetensors" for name in ("ours", "theirs"))
    with safe_open(ours, framework="pt") as one, safe_open(theirs, framework="pt") as other:
        assert sorted(other.keys()) == sorted(name for name in one.keys() if not name.endswith(".knee"))  # noqa: SIM118
        assert all(torch.equal(one.get_tensor(name), other.get_tensor(name)) for name in other.keys())  # noqa: SIM118
