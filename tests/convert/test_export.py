"""Exports compute the same as the patched model, without hf_qknorm, or are refused with nothing written."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_qknorm import SCHEMES, Scheme, calibrate, cli, export_native, patch_model, remove_norms, set_knee, unpatch_model
from hf_qknorm.families.counterparts import COUNTERPARTS
from hf_qknorm.ops.cpu import build
from qknorm_tests.kneed import REMOVED
from qknorm_tests.tables import assert_near, error, make_batch, randomise, real, sharp_model

TOLERANCE = 1e-5
RMS = Scheme(q="rms", k="rms")
EPS = {"rms_norm_eps": 1e-6}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
TEXT = "Long ago, a small model of language was asked to forget its norms. " * 40

# Model type, settings, scheme.
CASES: dict[str, tuple[str, dict[str, Any], Scheme]] = {
    "llama": ("llama", EPS, RMS),
    "tied": ("llama", EPS | {"tie_word_embeddings": True}, RMS),
    "wide heads": ("llama", EPS | {"head_dim": 32, "hidden_act": "gelu"}, RMS),
    "yarn": ("llama", EPS | {"rope_parameters": YARN}, RMS),
    "llama3": ("llama", EPS | {"rope_parameters": LLAMA3}, RMS),
    "another eps": ("llama", {"rms_norm_eps": 1e-3, "attention_bias": True}, RMS),
    "another scale": ("llama", EPS, Scheme(q="rms", k="rms", scale=0.3)),
    "no gain": ("llama", EPS, Scheme(q="rms", k="rms", gain="none")),
    "scalar gain": ("llama", EPS, Scheme(q="rms", k="rms", gain="scalar")),
    "henry": ("llama", EPS, SCHEMES["henry"]),
    "henry, wide heads": ("llama", EPS | {"head_dim": 32}, SCHEMES["henry"]),
    "lp of order 2": ("llama", EPS, Scheme(q="lp", k="lp", gain="scalar", scale=1.0)),
    "mistral": ("mistral", {"sliding_window": None} | EPS, RMS),
    "mistral, window": ("mistral", EPS, RMS),
    "qwen2": ("qwen2", {"use_sliding_window": False} | EPS, RMS),
    "qwen2, window": ("qwen2", EPS, RMS),
    "mixtral": ("mixtral", {"sliding_window": None} | EPS, RMS),
    "mixtral, window": ("mixtral", EPS, RMS),
    "ended knee": ("llama", EPS, RMS),
    "knee": ("llama", EPS | {"attention_bias": True}, RMS),
    "knee, l2": ("llama", EPS, Scheme(q="l2", k="rms")),
    "knee, mixtral": ("mixtral", EPS, RMS),
}


@pytest.fixture(autouse=True)
def _in_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports are compared with transformers' own norms, which are in PyTorch."""
    monkeypatch.setattr(build, "_switch", lambda: "0")


def save_patched(
    folder: Path, model_type: str, settings: dict[str, Any], scheme: Scheme | str, *, knee: float = 0.0,
    sharpness: float = 1.0, ended: bool = False,
) -> Any:  # fmt: skip
    """Save a patched model with random gains, also of the unpatched norms, and perhaps with a knee."""
    model = randomise(patch_model(sharp_model(model_type, **settings), scheme), knee=knee, sharpness=sharpness)
    if ended:
        set_knee(model, 0.0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layernorm" in name or name.endswith("model.norm.weight"):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def logits(model: Any, kind: str = "left") -> Tensor:
    """The logits of the tokens that are no padding, whose own differ between models."""
    batch = make_batch(kind, labels=False)
    return model(**batch).logits[real(batch)]


@pytest.mark.parametrize("case", CASES)
def test_an_export_computes_the_same(tmp_path, case):
    model_type, settings, scheme = CASES[case]
    patched = save_patched(tmp_path / "ours", *CASES[case], knee=4.0 * ("knee" in case), ended="ended" in case)
    report = export_native(tmp_path / "ours", tmp_path / "theirs")
    native, info = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert not any(info.values()), "no tensor is missing or unexpected"
    assert native.config.model_type == COUNTERPARTS[model_type]
    assert type(native).__module__.startswith("transformers.")
    assert report.architecture == type(native).__name__ == native.config.architectures[0]
    assert "qk_norm" not in (tmp_path / "theirs/config.json").read_text()
    for kind in ("plain", "left"):
        assert_near(logits(native, kind), logits(patched, kind), TOLERANCE)
    batch = make_batch("left", labels=False)
    generate = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(native.generate(**batch, **generate), patched.generate(**batch, **generate))
    unpatched = logits(unpatch_model(patched), "plain")
    assert (logits(native, "plain") - unpatched).abs().max() > 0.01, "the comparison can fail"


def test_every_counterpart_is_tested():
    assert {model_type for model_type, _, _ in CASES.values()} == COUNTERPARTS.keys()


@pytest.mark.parametrize("case", ["llama", "henry", "scalar gain", "qwen2", "mixtral"])
def test_bfloat16_stays_as_it_is(tmp_path, case):
    """If no tensor is rounded again, logits are equal; √16 is a power of two."""
    save_patched(tmp_path / "first", *CASES[case])
    patched = AutoModelForCausalLM.from_pretrained(tmp_path / "first", dtype=torch.bfloat16)
    patched.save_pretrained(tmp_path / "ours")
    export_native(tmp_path / "ours", tmp_path / "theirs")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").dtype == torch.bfloat16
    native = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32)
    assert_near(logits(native, "plain"), logits(patched.float(), "plain"), TOLERANCE)


def test_a_trained_model_with_its_tokenizer(tmp_path, shared):
    source = shared / "checkpoints/llama-shakespeare"
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = "{{ messages }}"
    model = randomise(patch_model(AutoModelForCausalLM.from_pretrained(source), "qk_norm"))
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
    assert torch.equal(native.generate(**tokens, max_new_tokens=20), model.generate(**tokens, max_new_tokens=20))


# Norms that have become constant factors.
CONSTANT = {name: case for name, case in REMOVED.items() if not case[1].softcap} | {
    "fused": ("gpt2", Scheme(q="layer", k="layer", bias=True), {}),
    "scale": ("qwen2", dataclasses.replace(RMS, scale=0.3), {}),
}


@pytest.mark.parametrize("case", CONSTANT)
def test_removed_norms_are_exported_as_the_model_that_was_patched(tmp_path, case):
    model_type, scheme, settings = CONSTANT[case]
    model: Any = randomise(patch_model(sharp_model(model_type, **settings), scheme), knee=1.0).eval()
    whole = logits(model)
    set_knee(model, math.inf)
    assert error(logits(model), whole) > 1e-2, "the norms' part can be seen"
    model.save_pretrained(tmp_path / "ours")
    expected = logits(model)
    report = export_native(tmp_path / "ours", tmp_path / "theirs")
    native, info = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert not any(info.values()), "no tensor is missing or unexpected"
    assert report.architecture == type(native).__name__
    assert_near(logits(native.eval()), expected, 5e-6)
    folded = remove_norms(model)
    assert type(native) is type(folded)
    assert all(torch.equal(x, native.state_dict()[name]) for name, x in folded.state_dict().items())


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    (tmp_path / "corpus.txt").write_text(TEXT)
    return str(tmp_path / "corpus.txt")


def converted(llama: Path, scheme: Scheme, knee: float, dtype: torch.dtype = torch.float32) -> Path:
    """A patched and calibrated checkpoint with a tokenizer."""
    folder, tokenizer = llama.parent / "converted", AutoTokenizer.from_pretrained(llama)
    model = patch_model(AutoModelForCausalLM.from_pretrained(llama), scheme)
    calibrate(model, [TEXT], tokenizer=tokenizer, length=64, knee=knee, sharpness=8)
    for saved in (model.to(dtype), tokenizer):
        saved.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_that_act_are_taken_off_and_the_logged_losses_are_the_models_own(dtype, llama, corpus, capsys, caplog):
    folder = converted(llama, RMS, 2.0, dtype)
    out = folder.parent / "plain"
    options = ["--max-loss-increase", "0.05", "--length", "64"]
    assert cli.main(["export", str(folder), str(out), "--data", corpus, *options]) == 0
    assert "plain: LlamaForCausalLM, which transformers loads without hf_qknorm" in capsys.readouterr().out
    losses = re.search(r"norms removed: the loss goes from (\S+) to (\S+) ", caplog.text)
    ids = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt")["input_ids"]
    rows = ids[0, : ids.numel() // 64 * 64].view(-1, 64)
    for place, loss in zip((folder, out), losses.groups(), strict=True):
        model = AutoModelForCausalLM.from_pretrained(place)
        assert model.dtype == dtype
        with torch.no_grad():
            assert float(model(rows, labels=rows).loss) == pytest.approx(
                float(loss), abs=5e-3 if dtype.itemsize < 4 else 1e-4
            )


def test_a_rise_above_the_limit_writes_nothing(llama, corpus):
    folder = converted(llama, RMS, 0.01)
    before = sorted(folder.parent.iterdir())
    with pytest.raises(ValueError, match=r"is not exported: .* loss goes from \S+ to \S+ \(\+.*max_loss_increase=0"):
        export_native(folder, folder.parent / "plain", data=corpus, max_loss_increase=0.0)
    assert sorted(folder.parent.iterdir()) == before
