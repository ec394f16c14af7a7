"""The ε of a knee is saved and loaded in fp32 in every way; an invalid one is refused with its name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tables import make_batch, randomise, sharp_model
from test_towers import made as made_tower
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from hf_qknorm import Scheme, patch_model
from hf_qknorm.model.attention import head_norms, patched_layers
from hf_qknorm.model.derived import derived_model
from hf_qknorm.model.knees import apply_knee, powers_of
from hf_qknorm.scheme import STORED

KNEED = Scheme(q="rms", k="layer", v="l2", gain="per_head", bias=True, softcap=5.0, knee=4.0)
LAYERS = {"model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "disk"}
OFFLOADED = {"device_map": {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu", **LAYERS}}
LOADING: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp32": {"torch_dtype": torch.float32},
    "bf16": {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16},
    "ignoring sizes": {"ignore_mismatched_sizes": True},
    "low memory": {"low_cpu_mem_usage": True},
    "device map": {"device_map": "cpu"},
    "offloaded": OFFLOADED,
    "buffers offloaded": {**OFFLOADED, "offload_buffers": True, "dtype": torch.bfloat16},
}
NAME = "model.layers.1.self_attn.k_norm.eps"


def made(scheme: Scheme = KNEED) -> PreTrainedModel:
    return randomise(patch_model(sharp_model("llama"), scheme)).eval()


def knees(model: Any) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if name.endswith(".eps")}


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(**make_batch("left", labels=False)).logits


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    made().save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def edit_scheme(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["qk_norm"] |= fields
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("how", LOADING)
def test_round_trip(how, tmp_path):
    """Also in shards, and of what was loaded in another dtype or onto disk."""
    model, options = made(), dict(LOADING[how])
    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    if "disk" in str(options):
        options["offload_folder"] = tmp_path / "offload"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", **options)
    expected = made().to(options.get("dtype", torch.float32))
    expected.model.rotary_emb = model.model.rotary_emb  # whose buffers a loaded model has in fp32
    assert torch.equal(logits(loaded), logits(expected))
    assert all("knee=4" in str(norm) for norm in head_norms(loaded.model.layers[0].self_attn).values())
    loaded.save_pretrained(tmp_path / "again")
    again = knees(AutoModelForCausalLM.from_pretrained(tmp_path / "again"))
    assert len(again) == len(set(map(float, again.values()))) == 6
    for name, eps in knees(model).items():
        assert again[name].dtype == torch.float32
        assert torch.equal(again[name], eps), name


def test_an_offloaded_knee_can_not_be_changed(tmp_path):
    """The norm's buffer has no memory, and accelerate loads its value for each call."""
    model = made()
    model.save_pretrained(tmp_path / "saved")
    options = {**OFFLOADED, "offload_folder": tmp_path / "offload"}
    there = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", **options)
    apply_knee(there, 1.0, powers_of(there))
    apply_knee(model, 1.0, powers_of(model))
    assert torch.equal(logits(there), logits(model))
    away = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", offload_buffers=True, **options)
    for change in (lambda: powers_of(away), lambda: apply_knee(away, 1.0, powers_of(model))):
        with pytest.raises(ValueError, match="on the meta device: load the model without offload_buffers=True"):
            change()
    assert away.config.scheme == KNEED


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_an_eps_of_another_floating_dtype_becomes_fp32(dtype, checkpoint):
    edit_weights(checkpoint, lambda weights: weights.update({NAME: weights[NAME].to(dtype)}))
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    assert torch.equal(knees(loaded)[NAME], knees(made())[NAME].to(dtype).float())
    assert knees(loaded)[NAME].dtype == torch.float32


def test_the_mean_is_read_from_eps(checkpoint):
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint)
    for layer, expected in zip(patched_layers(loaded).values(), patched_layers(made()).values(), strict=True):
        for name, norm in head_norms(expected).items():
            assert head_norms(layer)[name].mean_power() == norm.mean_power() > 0.09


# Changes of the weights, and the message of every way of loading.
HARMED: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (lambda w: w.pop(NAME), "1 norm parameters are missing from the weights, first '{name}'"),
    "a list": (lambda w: w.update({NAME: torch.ones(1)}), r"\('{name}' is \[1\], expected \[\]\)"),
    "channels": (lambda w: w.update({NAME: torch.ones(16)}), r"\('{name}' is \[16\], expected \[\]\)"),
    "integer": (lambda w: w.update({NAME: torch.tensor(3)}), "'{name}' has dtype torch.int64|'{name}' has dtype I64"),
    "8 bits": (
        lambda w: w.update({NAME: w[NAME].to(torch.float8_e4m3fn)}),
        "'{name}' has dtype .*expected one of BF16",
    ),
    "NaN": (lambda w: w[NAME].fill_(float("nan")), "'{name}' is nan, expected a finite number ≥"),
    "infinite": (lambda w: w[NAME].fill_(float("inf")), "'{name}' is inf, expected a finite number ≥"),
    "zero": (lambda w: w[NAME].fill_(0.0), "'{name}' is 0, expected a finite number ≥"),
    "negative": (lambda w: w[NAME].fill_(-1.0), "'{name}' is -1, expected a finite number ≥"),
    "below the scheme's": (lambda w: w[NAME].fill_(1e-9), "'{name}' is 1e-09, .* ≥ 1e-06, the scheme's eps"),
}


@pytest.mark.parametrize("harm", HARMED)
def test_an_invalid_eps_is_refused(harm, checkpoint):
    change, message = HARMED[harm]
    edit_weights(checkpoint, change)
    message = message.replace("{name}", re.escape(NAME)) + r"[\s\S]*Restore the"
    for options in ({}, {"ignore_mismatched_sizes": True}, {"dtype": torch.float16, "device_map": "cpu"}):
        with pytest.raises(ValueError, match=message):
            AutoModelForCausalLM.from_pretrained(checkpoint, **options)
    weights, config = load_file(checkpoint / "model.safetensors"), AutoConfig.from_pretrained(checkpoint)
    with pytest.raises(ValueError, match=message):
        derived_model(type(made()).base_class).from_pretrained(None, config=config, state_dict=weights)
    torch.save(weights, checkpoint / "pytorch_model.bin")
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(checkpoint)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("harm", HARMED)
def test_a_state_dict_with_such_an_eps_is_refused(harm, assign):
    model = made()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    HARMED[harm][0](weights)
    with pytest.raises(RuntimeError, match=re.escape(NAME)):
        model.load_state_dict(weights, assign=assign)
    assert torch.equal(knees(model)[NAME], knees(made())[NAME])


def test_a_state_dict_in_another_dtype_leaves_eps_in_fp32():
    source = {name: value.to(torch.bfloat16) for name, value in made().state_dict().items()}
    model = made()
    model.load_state_dict(source, assign=True)
    assert all(eps.dtype == torch.float32 for eps in knees(model).values())


@pytest.mark.parametrize("strict", [False, True])  # Trainer goes back to its best checkpoint by False
def test_a_state_dict_with_knees_does_not_fit_norms_without(strict):
    plain = patch_model(sharp_model("llama"), Scheme(q="rms", k="layer", v="l2", gain="per_head", bias=True))
    with pytest.raises(
        RuntimeError, match="eps is in the weights, and the norm has no knee. Load the checkpoint by from_pre"
    ):
        plain.load_state_dict(made().state_dict(), strict=strict)


@pytest.mark.parametrize("ignore", [False, True])
def test_a_scheme_and_weights_of_which_one_has_no_knee(ignore, checkpoint, tmp_path):
    edit_scheme(checkpoint, knee=0.0)
    with pytest.raises(ValueError, match=r"6 norm parameters are in the weights but not in the scheme, .*k_norm\.eps"):
        AutoModelForCausalLM.from_pretrained(checkpoint, ignore_mismatched_sizes=ignore)
    made(Scheme(q="rms", k="rms")).save_pretrained(tmp_path / "plain")
    edit_scheme(tmp_path / "plain", knee=4.0)
    with pytest.raises(ValueError, match=r"4 norm parameters are missing from the weights, .*k_norm\.eps.*knee=4\.0"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "plain", ignore_mismatched_sizes=ignore)


@pytest.mark.parametrize("knee", [-1.0, float("nan"), float("inf"), "4", True, None, 10**400], ids=str)
def test_an_impossible_knee_is_refused(knee, checkpoint):
    edit_scheme(checkpoint, knee=knee)
    with pytest.raises(ValueError, match=r"Scheme\(knee=.* is not possible: expected a finite number ≥ 0"):
        AutoModelForCausalLM.from_pretrained(checkpoint)


def test_without_a_knee_config_and_weights_have_no_knee(tmp_path):
    made(Scheme(q="rms", k="rms")).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["qk_norm"].keys() == {*STORED}
    assert not [name for name in load_file(tmp_path / "model.safetensors") if name.endswith("eps")]


def test_a_rank_that_reads_no_weights_is_not_refused(checkpoint, monkeypatch, process_group):
    """By FSDP's `cpu_ram_efficient_loading` it gets them from rank 0; older transformers leave zeros until then."""
    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    assert len(knees(AutoModelForCausalLM.from_pretrained(checkpoint))) == 6


@pytest.fixture
def llava(tmp_path: Path) -> Path:
    """A multimodal model whose text tower has knees, and whose vision tower has norms without."""
    model = patch_model(made_tower("llava"), Scheme(q="rms", k="rms", knee=4.0))
    patch_model(model, "qk_norm", tower="vision_tower")
    randomise(model).save_pretrained(tmp_path)
    return tmp_path


def test_a_tower_saves_and_loads_its_knees(llava):
    again = AutoModelForImageTextToText.from_pretrained(llava, dtype=torch.float16)
    expected = load_file(llava / "model.safetensors")
    stored = {name: value for name, value in expected.items() if name.endswith(".eps")}
    assert sorted(map(float, stored.values())) == sorted(map(float, knees(again).values()))
    assert len(stored) == len(knees(again)) == 4
    assert {eps.dtype for eps in knees(again).values()} == {torch.float32}


@pytest.mark.parametrize("harm", HARMED)
def test_an_invalid_eps_of_a_tower_is_refused(harm, llava):
    stored = next(
        name for name in load_file(llava / "model.safetensors") if name.endswith("layers.1.self_attn.k_norm.eps")
    )
    change, message = HARMED[harm]

    def change_stored(weights: dict[str, Tensor]) -> None:
        weights[NAME] = weights.pop(stored)
        change(weights)
        if NAME in weights:
            weights[stored] = weights.pop(NAME)

    edit_weights(llava, change_stored)
    with pytest.raises(ValueError, match=message.replace("{name}", r"[\w.]*layers\.1\.self_attn\.k_norm\.eps")):
        AutoModelForImageTextToText.from_pretrained(llava)


def test_a_towers_scheme_without_a_knee(llava):
    config = json.loads((llava / "config.json").read_text())
    config["text_config"]["qk_norm"].pop("knee")
    (llava / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"4 norm parameters are in the weights but not in the scheme, .*k_norm\.eps"):
        AutoModelForImageTextToText.from_pretrained(llava)
