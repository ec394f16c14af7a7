"""Exports to transformers' own models: the same logits, in a process that never saw the package; else a refusal."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tables import MODEL_TYPES, assert_near, make_batch, randomise, real, sharp_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from hf_qknorm import FAMILIES, SCHEMES, Scheme, export_native, patch_model, unpatch_model
from hf_qknorm.export.targets import TARGETS
from hf_qknorm.model.derived import derived_model
from hf_qknorm.model.norms import HeadNorm

TOLERANCE = 1e-5
RMS = Scheme(q="rms", k="rms")
LAYER = Scheme(q="layer", k="layer", eps=1e-5)
EPS = {"rms_norm_eps": 1e-6}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip

# What is patched, its settings, the scheme, and what it is exported as.
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
    "gemma2-scale": ("gemma2", {"attn_logit_softcapping": 0.5}, Scheme(scale=0.3), "gemma2"),
    **{f"{model_type}-none": (model_type, {}, SCHEMES["none"], model_type) for model_type in MODEL_TYPES},
}  # fmt: skip


@torch.no_grad()
def save_patched(folder: Path, model_type: str, settings: dict[str, Any], scheme: Scheme | str, **options: Any) -> Any:
    """A patched model with random gains, also in the norms that were there before, and saved."""
    model = randomise(patch_model(sharp_model(model_type, **settings), scheme))
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if type(module).__name__.endswith("Norm") and not isinstance(module, HeadNorm):
            for parameter in module.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.save_pretrained(folder, **options)
    return model


@torch.no_grad()
def logits(model: Any, kind: str) -> Tensor:
    batch = make_batch(kind, labels=False)
    return model(**batch).logits[real(batch)]


@pytest.mark.parametrize("case", CASES)
def test_an_export_computes_the_same(tmp_path, case):
    model_type, settings, scheme, target = CASES[case]
    patched = save_patched(tmp_path / "ours", model_type, settings, scheme)
    if FAMILIES[model_type].own_cap:  # older transformers drop Gemma 2's own cap by default
        patched.set_attn_implementation("eager")
    report = export_native(tmp_path / "ours", tmp_path / "theirs")
    native, info = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert not any(info.values()), "nothing is missing, and nothing is left over"
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


def test_plain_transformers_loads_it(tmp_path):
    tokens = make_batch("plain")["input_ids"]
    expected = {}
    for case in ("llama", "mixtral", "gpt_neox", "llama-cap", "gemma2-cap"):
        patched = save_patched(tmp_path / f"{case}-ours", *CASES[case][:3])
        export_native(tmp_path / f"{case}-ours", tmp_path / case)
        expected[case] = patched(tokens).logits.detach()
    folders = [str(tmp_path / case) for case in expected]
    subprocess.run([sys.executable, "-c", LOAD, json.dumps(tokens.tolist()), *folders], check=True)
    for case, ours in expected.items():
        assert_near(torch.load(tmp_path / case / "logits.pt"), ours, TOLERANCE, case)


def test_every_target_is_tested():
    tested = {(model_type, target) for model_type, _, _, target in CASES.values()}
    assert {(model_type, t.model_type) for model_type, targets in TARGETS.items() for t in targets} <= tested


@pytest.mark.parametrize("case", ["llama", "phi3", "mixtral", "gpt_neox", "llama-cap-tied", "gemma2-cap"])
def test_shards_stay_shards(tmp_path, case):
    patched = save_patched(tmp_path / "ours", *CASES[case][:3], max_shard_size="60KB")
    export_native(tmp_path / "ours", tmp_path / "theirs")
    names = {path.name for path in (tmp_path / "theirs").glob("*.safetensors")}
    assert names == {path.name for path in (tmp_path / "ours").glob("*.safetensors")}
    assert len(names) > 1
    native = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    assert_near(logits(native, "plain"), logits(patched, "plain"), TOLERANCE)


@pytest.mark.parametrize("case", ["llama", "llama-henry", "llama-scalar-gain", "qwen2", "phi3", "mixtral"])
def test_bfloat16_stays_as_it_is(tmp_path, case):
    """Where nothing must be rounded anew, every tensor is the source's, to the bit; √16 is a power of two."""
    model_type, settings, scheme, _ = CASES[case]
    patched = save_patched(tmp_path / "first", model_type, settings, scheme)
    patched.to(torch.bfloat16).save_pretrained(tmp_path / "ours")
    export_native(tmp_path / "ours", tmp_path / "theirs")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").dtype == torch.bfloat16
    patched, native = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32) for name in ("ours", "theirs")
    )
    assert_near(logits(native, "plain"), logits(patched, "plain"), TOLERANCE)


# What is patched, its settings, the scheme, and what the refusal says.
REFUSED: dict[str, tuple[str, dict[str, Any], Scheme | str, str]] = {
    **{
        f"{model_type}-knee": (
            model_type, {}, replace(LAYER if model_type == "gpt_neox" else RMS, knee=4.0),
            f"{targets[0].model_type} would be its counterpart, but the knee of 4 would be lost: one eps .*knee=0",
        )
        for model_type, targets in TARGETS.items()
    },
    "cap-and-norms": ("llama", EPS, "qk_norm_cap", r"k=rms\) or the cap of 50 would be lost: .* a llama but for both"),
    "gemma2-own-cap": ("gemma2", {}, "qk_norm", r"k=rms\) or the cap of 50 would be lost: .* a gemma2 but for both"),
    "values": ("llama", EPS, "qkv_norm", "the norm of the values would be lost: convert with"),
    "queries-alone": ("llama", EPS, "q_norm", "not one of them: convert with a scheme on both"),
    "keys-alone": ("llama", EPS, Scheme(k="rms"), "not one of them: convert with a scheme on both"),
    "order": ("llama", EPS, "lp", "of order 2, not p=3: convert with henry or qk_norm"),
    "per-head": ("llama", EPS, Scheme(q="rms", k="rms", gain="per_head"), 'convert with gain="shared"'),
    "two-kinds": ("llama", EPS, Scheme(q="rms", k="layer", bias=False), r"norms \(q=rms, k=layer\) would be lost"),
    "rms-bias": ("llama", EPS, Scheme(q="rms", k="rms", bias=True), "biases of the norms.*convert with bias=False"),
    "layer-norm": ("llama", EPS, LAYER, r"norms \(q=layer, k=layer\) would be lost.*gpt_neox with layer"),
    "mlp-bias": ("llama", EPS | {"mlp_bias": True}, RMS, "qwen3 would be.*biases of the MLP would be lost"),
    "mlp-bias-cap": ("llama", {"mlp_bias": True}, "soft_cap", "vaultgemma would be.*biases of the MLP would be lost"),
    "mixtral-cap": ("mixtral", {}, "soft_cap", "the cap of 50 would be lost.*llama with a cap"),
    "qwen3-cap": ("qwen3", {}, "soft_cap", "the cap of 50 would be lost"),
    "gpt2": ("gpt2", {}, "qk_norm", r"norms \(q=layer, k=layer\) would be lost"),
    "gpt2-scale": ("gpt2", {}, Scheme(scale=1.0), "scale=1 would be lost: gpt2 has no projection of the queries alone"),
    "serial-neox": ("gpt_neox", {"use_parallel_residual": False}, LAYER, "attention and MLP are in parallel there"),
    "partial-phi3": (
        "phi3", EPS | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        RMS, "partial_rotary_factor=0.5 would be lost: only Phi-3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_exact_is_refused(tmp_path, case):
    model_type, settings, scheme, message = REFUSED[case]
    save_patched(tmp_path / "ours", model_type, settings, scheme)
    with pytest.raises(ValueError, match=rf"ours \({model_type}, .*is not exported: .*{message}"):
        export_native(tmp_path / "ours", tmp_path / "theirs")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "llama-another-eps",
            r"eps=1e-06 is not the model's 0.001.*scaled by 31.62.*\(..., eps=0.001\)",
        ),
        ("llama-another-scale", "the queries' gains would be scaled"),
        ("llama-henry-wide-heads", "the queries' gains would be scaled"),
        ("llama-cap", "stored as their difference from 1"),
        ("gemma2-scale", "scale=0.3 would be folded"),
        ("gpt_neox", "two norms of a layer would become one"),
    ],
)
def test_what_would_round_sixteen_bits_anew_is_refused(tmp_path, case, message):
    patched = save_patched(tmp_path / "first", *CASES[case][:3])
    patched.to(torch.bfloat16).save_pretrained(tmp_path / "ours")
    with pytest.raises(
        ValueError, match=rf"not be exact in bfloat16: .*{message}.*Save the checkpoint in float32 first"
    ):
        export_native(tmp_path / "ours", tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


def test_only_whole_causal_models_of_ours_are_taken(tmp_path):
    sharp_model("llama").save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="is a plain llama, not a patched model"):
        export_native(tmp_path / "plain", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json"):
        export_native(tmp_path / "empty", tmp_path / "out")
    model = save_patched(tmp_path / "ours", *CASES["llama"][:3])
    with pytest.raises(FileExistsError, match="is where the source lies"):
        export_native(tmp_path / "ours", tmp_path / "ours", overwrite=True)
    change_config(tmp_path / "ours", qk_norm_blend={"norms": True, "softcap": None})
    with pytest.raises(ValueError, match="during a blend"):
        export_native(tmp_path / "ours", tmp_path / "out")
    change_config(tmp_path / "ours", qk_norm_blend=None, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ValueError, match="is quantised"):
        export_native(tmp_path / "ours", tmp_path / "out")
    classifier = AutoModelForSequenceClassification.from_config(model.config)
    classifier.save_pretrained(tmp_path / "classifier")
    with pytest.raises(ValueError, match="as a causal language model only, got LlamaForSequenceClassification"):
        export_native(tmp_path / "classifier", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def change_config(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


def test_a_classifier_without_a_scheme_goes_back(tmp_path):
    config = patch_model(sharp_model("llama"), "none").config
    model = derived_model(type(AutoModelForSequenceClassification.from_config(config)).base_class)(config).eval()
    model.save_pretrained(tmp_path / "ours")
    assert export_native(tmp_path / "ours", tmp_path / "theirs").architecture == "LlamaForSequenceClassification"
    native = AutoModelForSequenceClassification.from_pretrained(tmp_path / "theirs")
    tokens = make_batch("plain")["input_ids"][:1]
    torch.testing.assert_close(native(tokens).logits, model(tokens).logits, rtol=0, atol=0)


def test_a_destination_that_is_there_is_kept(tmp_path):
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


def test_nothing_is_copied_that_stays_the_same(tmp_path):
    """A Llama's tensors, gains included, are Qwen 3's: the weights file says the same, byte for byte."""
    save_patched(tmp_path / "ours", *CASES["llama"][:3])
    export_native(tmp_path / "ours", tmp_path / "theirs")
    ours, theirs = (tmp_path / name / "model.safetensors" for name in ("ours", "theirs"))
    with safe_open(ours, framework="pt") as one, safe_open(theirs, framework="pt") as other:
        assert sorted(one.keys()) == sorted(other.keys())
        assert all(torch.equal(one.get_tensor(name), other.get_tensor(name)) for name in one.keys())  # noqa: SIM118
