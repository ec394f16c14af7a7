"""Powers behind a knee are stored in config.json, and ε in the weights; invalid and contradictory ones are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from hf_qknorm import Scheme, patch_model
from hf_qknorm.model.derived import derived_model
from hf_qknorm.model.knees import apply_knee, powers_of
from hf_qknorm.ops.cpu import build
from qknorm_tests.folders import edit, edit_config
from qknorm_tests.kneed import as_older, eps_of, logits
from qknorm_tests.tables import randomise, sharp_model

KNEED = Scheme(q="rms", k="layer", v="l2", gain="per_head", bias=True, softcap=5.0, knee=4.0)
LAYERS = {"model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "disk"}
OFFLOADED = {"device_map": {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu", **LAYERS}}
IN_MEMORY: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp32": {"torch_dtype": torch.float32},
    "bf16": {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16},
    "ignoring sizes": {"ignore_mismatched_sizes": True},
    "low memory": {"low_cpu_mem_usage": True},
    "device map": {"device_map": "cpu"},
}
LOADING = IN_MEMORY | {
    "offloaded": OFFLOADED,
    "buffers offloaded": {**OFFLOADED, "offload_buffers": True, "dtype": torch.bfloat16},
}
LAYER = "model.layers.1.self_attn"
NAME = f"{LAYER}.k_norm.eps"


def made(scheme: Scheme = KNEED) -> PreTrainedModel:
    return randomise(patch_model(sharp_model("llama"), scheme)).eval()


def assert_equal_eps(model: PreTrainedModel, expected: PreTrainedModel) -> None:
    found, wanted = eps_of(model), eps_of(expected)
    assert found.keys() == wanted.keys()
    assert len(set(map(float, wanted.values()))) == len(wanted)
    for name, eps in wanted.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], eps), name


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    made().save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def older(checkpoint: Path) -> Path:
    assert NAME in as_older(checkpoint)
    return checkpoint


def check_round_trip(folder: Path, options: dict[str, Any], again: Path) -> None:
    model = made()
    loaded = AutoModelForCausalLM.from_pretrained(folder, **options)
    expected = made().to(options.get("dtype", torch.float32))
    expected.model.rotary_emb = model.model.rotary_emb  # whose buffers a loaded model has in fp32
    assert torch.equal(logits(loaded), logits(expected))
    loaded.save_pretrained(again)
    assert_equal_eps(AutoModelForCausalLM.from_pretrained(again), model)


@pytest.mark.parametrize("how", LOADING)
def test_round_trip(how, tmp_path, monkeypatch):
    """Also in shards, and of what was loaded in another dtype or onto disk."""
    if "offloaded" in how:
        monkeypatch.setenv(build.SWITCH, "0")  # norms that accelerate hooks run in PyTorch
    made().save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    options = dict(LOADING[how])
    if "disk" in str(options):
        options["offload_folder"] = tmp_path / "offload"
    check_round_trip(tmp_path / "saved", options, tmp_path / "again")


def test_the_config_has_the_powers_of_each_norm(checkpoint):
    stored = json.loads((checkpoint / "config.json").read_text())["qk_norm_powers"]
    found = {(layer, norm): power for layer, norms in stored.items() for norm, power in norms.items()}
    assert found == powers_of(made())


def test_a_model_without_its_head_finds_the_powers_of_its_layers(checkpoint):
    base = AutoModel.from_pretrained(checkpoint)
    assert_equal_eps(base, made().model)
    base.save_pretrained(checkpoint.parent / "base")
    again = AutoModelForCausalLM.from_pretrained(checkpoint.parent / "base")
    assert_equal_eps(again, made())


def test_an_engine_that_loads_parameters_alone_computes_the_same(checkpoint):
    """Such an engine builds the model on the meta device from its config, and leaves buffers there."""
    config = AutoConfig.from_pretrained(checkpoint)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert_equal_eps(model, made())
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        if kind == "eps":
            continue
        setattr(model.get_submodule(module), kind, torch.nn.Parameter(weight, requires_grad=False))
    model.model.rotary_emb = made().model.rotary_emb
    model.tie_weights()
    assert torch.equal(logits(model.eval()), logits(made()))


def test_the_knee_of_a_model_that_accelerate_loads_can_be_ended(checkpoint):
    """Its loader writes into the modules, and leaves the buffer that it finds there."""
    with init_empty_weights():
        there = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))
    there.tie_weights()
    there, model = load_checkpoint_and_dispatch(there, checkpoint, device_map={"": "cpu"}).eval(), made()
    powers = powers_of(model)
    for knee in (0.0, 1.0):
        for changed in (there, model):
            apply_knee(changed, knee, powers)
        assert torch.equal(logits(there), logits(model))
    assert_equal_eps(there, model)


@pytest.mark.parametrize("offload_buffers", [False, True])
def test_the_knee_of_an_offloaded_model_can_be_changed(offload_buffers, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv(build.SWITCH, "0")  # norms that accelerate hooks run in PyTorch
    options = {**OFFLOADED, "offload_folder": tmp_path / "offload", "offload_buffers": offload_buffers}
    there, model = AutoModelForCausalLM.from_pretrained(checkpoint, **options), made()
    for changed in (there, model):
        apply_knee(changed, 1.0, powers_of(changed))
    assert torch.equal(logits(there), logits(model))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_an_eps_of_another_floating_dtype_becomes_fp32(dtype, older):
    edit(older, lambda weights: weights.update({NAME: weights[NAME].to(dtype)}))
    loaded = AutoModelForCausalLM.from_pretrained(older, dtype=torch.bfloat16)
    assert float(eps_of(loaded)[NAME]) == pytest.approx(float(eps_of(made())[NAME].to(dtype)), rel=1e-6)
    assert eps_of(loaded)[NAME].dtype == torch.float32


def powers(change: Callable[[Any], object]) -> Callable[[dict[str, Any]], object]:
    return lambda config: change(config["qk_norm_powers"])


# Changes of config.json, and the message.
WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a list": (lambda c: c.update(qk_norm_powers=[1.0]), r"qk_norm_powers is \[1\.0\] for .*expected a finite number"),
    "no layers": (lambda c: c.update(qk_norm_powers={}), "qk_norm_powers lacks q_norm of model.layers.0.self_attn"),
    "a layer less": (powers(lambda p: p.pop(LAYER)), f"qk_norm_powers lacks q_norm of {LAYER}"),
    "a norm less": (powers(lambda p: p[LAYER].pop("k_norm")), f"qk_norm_powers lacks k_norm of {LAYER}"),
    "another norm": (powers(lambda p: p[LAYER].update(o_norm=1.0)), r"'model.layers.1.self_attn.o_norm', expected"),
    "text": (powers(lambda p: p[LAYER].update(k_norm="1")), f"qk_norm_powers is '1' for '{LAYER}.k_norm', expected"),
    "true": (powers(lambda p: p[LAYER].update(k_norm=True)), "qk_norm_powers is True for"),
    "NaN": (powers(lambda p: p[LAYER].update(k_norm=float("nan"))), "qk_norm_powers is nan for"),
    "infinite": (powers(lambda p: p[LAYER].update(k_norm=float("inf"))), "qk_norm_powers is inf for"),
    "negative": (powers(lambda p: p[LAYER].update(k_norm=-1.0)), "qk_norm_powers is -1.0 for"),
    "beyond fp32": (powers(lambda p: p[LAYER].update(k_norm=1e39)), r"a mean \|x\|ᵖ of 1e\+39 give ε"),
    "no knee": (lambda c: c["qk_norm"].update(knee=0.0), "has qk_norm_powers, and qk_norm has no knee"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_powers_are_refused(wrong, checkpoint):
    change, message = WRONG[wrong]
    edit_config(checkpoint, change)
    for options in ({}, {"ignore_mismatched_sizes": True}, {"dtype": torch.float16, "device_map": "cpu"}):
        with pytest.raises(ValueError, match=message):
            AutoModelForCausalLM.from_pretrained(checkpoint, **options)


def test_weights_that_contradict_the_config_are_refused(checkpoint):
    edit(checkpoint, lambda weights: weights[NAME].mul_(1.5))
    with pytest.raises(ValueError, match=rf"{NAME} is .* in the weights, and .* by the knee and the qk_norm_powers of"):
        AutoModelForCausalLM.from_pretrained(checkpoint)


def test_weights_without_eps_or_with_a_rounded_one_have_the_powers_of_the_config(checkpoint):
    """As weights that were saved from shards, or rounded by another tool."""
    edit(checkpoint, lambda weights: weights.update({NAME: weights[NAME].bfloat16()}))
    assert_equal_eps(AutoModelForCausalLM.from_pretrained(checkpoint), made())
    edit(checkpoint, lambda weights: [weights.pop(name) for name in eps_of(made())])
    assert_equal_eps(AutoModelForCausalLM.from_pretrained(checkpoint), made())


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
def test_an_invalid_eps_is_refused(harm, older):
    change, message = HARMED[harm]
    edit(older, change)
    message = message.replace("{name}", re.escape(NAME)) + r"[\s\S]*Restore the"
    for options in ({}, {"ignore_mismatched_sizes": True}, {"dtype": torch.float16, "device_map": "cpu"}):
        with pytest.raises(ValueError, match=message):
            AutoModelForCausalLM.from_pretrained(older, **options)
    weights, config = load_file(older / "model.safetensors"), AutoConfig.from_pretrained(older)
    with pytest.raises(ValueError, match=message):
        derived_model(type(made()).base_class).from_pretrained(None, config=config, state_dict=weights)
    torch.save(weights, older / "pytorch_model.bin")
    (older / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(older)


def test_a_state_dict_brings_its_eps():
    """Also to a model with another knee."""
    source, model = made(), made()
    apply_knee(source, 4.0, {key: 2 * power for key, power in powers_of(source).items()})
    for assign in (False, True):
        model.load_state_dict(source.state_dict(), assign=assign)
        assert_equal_eps(model, source)
        assert torch.equal(logits(model), logits(source))
        apply_knee(model, 2.0, powers_of(made()))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("harm", [harm for harm in HARMED if harm != "missing"])
def test_a_state_dict_with_such_an_eps_is_refused(harm, assign):
    model = made()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    HARMED[harm][0](weights)
    with pytest.raises(RuntimeError, match=re.escape(NAME)):
        model.load_state_dict(weights, assign=assign)
    assert torch.equal(eps_of(model)[NAME], eps_of(made())[NAME])


@pytest.mark.parametrize("strict", [False, True])  # Trainer goes back to its best checkpoint by False
def test_a_state_dict_with_knees_does_not_fit_norms_without(strict):
    plain = patch_model(sharp_model("llama"), Scheme(q="rms", k="layer", v="l2", gain="per_head", bias=True))
    with pytest.raises(
        RuntimeError, match="eps is in the weights, and the norm has no knee. Load the checkpoint by from_pre"
    ):
        plain.load_state_dict(made().state_dict(), strict=strict)


def test_a_rank_that_reads_no_weights_has_the_powers(checkpoint, monkeypatch, process_group):
    """By FSDP's `cpu_ram_efficient_loading` it gets its weights from rank 0."""
    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    assert_equal_eps(AutoModelForCausalLM.from_pretrained(checkpoint), made())


@pytest.mark.parametrize("how", IN_MEMORY)
def test_round_trip_of_an_older_checkpoint(how, older, tmp_path):
    check_round_trip(older, IN_MEMORY[how], tmp_path / "again")
