"""Every model that can be patched, patched; `test_refused.py` has the others.

By default one causal language model of each style, and the types that most tests run over, with variants for what a
config switches; and a few of the models of images, bidirectional ones, with an encoder, and of codebooks.
`pytest --all-families` runs over all, `--other-families` over those that it adds.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from hf_qknorm import FAMILIES, SCHEMES, Scheme, patch_model, unpatch_model
from hf_qknorm.families.style import CACHE
from hf_qknorm.model.attention import QKNormAttention, every_norm, head_norms, patched_layers
from hf_qknorm.model.derived import derived_model
from hf_qknorm.model.install import as_unpatched
from hf_qknorm.model.layer import QKNormAttention as PlainAttention
from hf_qknorm.model.raw_heads import kernel_rotary
from hf_qknorm.ops.types import Rotary
from qknorm_tests import vision_cases
from qknorm_tests.tables import (
    MODEL_TYPES,
    OWN_INPUTS,
    assert_backends_agree,
    assert_identical,
    assert_near,
    causal_families,
    chosen,
    fingerprint,
    make_batch,
    one_of_each_style,
    out_of,
    randomise,
    sharp_model,
    step,
)
from qknorm_tests.tiny import PARTIAL, tiny_config
from qknorm_tests.vision_cases import CAPPED, CASES, CONTINUED, EVERY, IMAGES, OTHERS, continued_codebooks, seen

KINDS = ("left", "right")
BACKENDS = ("hf_qknorm", "hf_qknorm_eager", "hf_qknorm_tiled")
NEW = 4
TOLERANCE = 1e-4  # near-identical logits, through two layers and whatever stands beside attention

# Switches of a config beyond the tiny settings of its type.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bailing_hybrid-direct": ("bailing_hybrid", {"q_lora_rank": None}),
    "cohere-normed": ("cohere", {"use_qk_norm": True}),
    "doge-selecting": ("doge", {"keep_window_size": 6}),
    "deepseek_v2-direct": ("deepseek_v2", {"q_lora_rank": None}),
    "deepseek_v3-halves": ("deepseek_v3", {"rope_interleave": False, "q_lora_rank": None}),
    "exaone4-full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention", "full_attention"]}),
    "gemma4_text-alone": ("gemma4_text", {"num_kv_shared_layers": 0, "attention_k_eq_v": True}),
    "glm4_moe-normed": ("glm4_moe", {"use_qk_norm": True}),
    "gemma2-uncapped": ("gemma2", {"attn_logit_softcapping": None}),
    "gpt2-inverse-layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2-unscaled": ("gpt2", {"scale_attn_weights": False}),
    "gpt2-upcast": ("gpt2", {"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True}),
    "gpt_neox-partial": ("gpt_neox", {"rope_parameters": PARTIAL}),
    "gpt_neox-sequential": ("gpt_neox", {"rope_parameters": PARTIAL, "use_parallel_residual": False}),
    "gpt_neox-no-bias": ("gpt_neox", {"attention_bias": False}),
    "gpt_bigcode-many": ("gpt_bigcode", {"multi_query": False}),
    "llama-bias": ("llama", {"attention_bias": True}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "mixtral-full": ("mixtral", {"sliding_window": None}),
    "phi3-partial": ("phi3", {"rope_parameters": PARTIAL}),
    "qwen2-full": ("qwen2", {"use_sliding_window": False}),
    "granitemoehybrid-unrotated": ("granitemoehybrid", {"position_embedding_type": "nope"}),
    "llama4_text-normed": ("llama4_text", {"use_qk_norm": True}),
    "lfm3-ungated": ("lfm3", {"use_attention_gate": False}),
    "olmo-unclipped": ("olmo", {"clip_qkv": None}),
    "opt-post": ("opt", {"do_layer_norm_before": False}),
    "persimmon-normed": ("persimmon", {"qk_layernorm": True}),
    "phi-normed": ("phi", {"qk_layernorm": True}),
    "stablelm-normed": ("stablelm", {"qk_layernorm": True}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True}),
    "zamba2-unrotated": ("zamba2", {"use_mem_rope": False}),
    "starcoder2-dropped": ("starcoder2", {"residual_dropout": 0.1}),
}

# Of the variants, those that change what the package computes
SWITCHED = ("gemma2-uncapped", "gpt2-inverse-layer", "gpt2-unscaled", "gpt2-upcast", "gpt_neox-partial", "llama-bias")
# Of types that are other models too
DECODERS = {f"{x}-decoder": (x, {}) for x in causal_families() if x in EVERY}
SETTINGS: dict[str, tuple[Any, ...]] = EVERY | VARIANTS | DECODERS
FEW = (*CASES, *CAPPED, "bart", "whisper", *OWN_INPUTS)
# Doge selects keys by a number for each value; those of equal tokens are equal, and one of them is selected by chance.
CHANCE = ("doge-selecting",)


def cases_of(types: Iterable[str], variants: Iterable[str], others: Iterable[str]) -> dict[str, list[str]]:
    lms = [f"{x}-decoder" if x in EVERY else x for x in dict.fromkeys([*MODEL_TYPES, *types])] + [*variants]
    alone = [case for case in others if case not in OTHERS and case not in CAPPED]
    return {"case": [*lms, *others], "lm": lms, "alone": alone, "saved": [*lms, *others]}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    few, every = cases_of(one_of_each_style(), SWITCHED, FEW), cases_of(causal_families(), VARIANTS, EVERY)
    few["saved"] = cases_of((), (), FEW)["saved"]
    for name in few.keys() & {*metafunc.fixturenames}:
        metafunc.parametrize(name, chosen(metafunc.config, few[name], every[name]))


def made(case: str) -> PreTrainedModel:
    if case in EVERY:
        return vision_cases.made(case)
    settings = SETTINGS.get(case, (case, {}))[-1]
    return sharp_model(type_of(case), **{"attention_dropout": 0.1, **settings})


def batches(case: str) -> list[dict[str, Any]]:
    return vision_cases.batches(case) if case in EVERY else [make_batch(kind) for kind in KINDS]


def type_of(case: str) -> str:
    return SETTINGS.get(case, (case,))[0]


def config_of(case: str) -> PretrainedConfig:
    return tiny_config(type_of(case), **SETTINGS.get(case, ({},))[-1])


def takes(case: str, preset: str) -> bool:
    """Whether a model can have the preset."""
    return case not in CAPPED and FAMILIES[type_of(case)].refusal(config_of(case), SCHEMES[preset]) is None


@torch.no_grad()
def continued(model: PreTrainedModel, case: str, *, use_cache: bool = True) -> Tensor:
    """The logits of the tokens after a prompt, each computed by itself with a cache, or all at once."""
    batch = {name: x for name, x in batches(case)[-1 if case in EVERY else 0].items() if name != "labels"}
    if case in OWN_INPUTS:
        return continued_codebooks(model, case, batch, use_cache=use_cache)
    settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "num_beams": 1}
    out = model.generate(**batch, **settings, use_cache=use_cache, return_dict_in_generate=True, output_logits=True)
    return torch.stack(out.logits)


def test_none_changes_nothing(case):
    """Training with dropout (loss, logits, gradients) and generation are bit-identical, and again after unpatching."""
    model, generates = made(case), case not in EVERY or case in CONTINUED
    before, expected = fingerprint(model), [step(model, batch) for batch in batches(case)]
    assert all(torch.isfinite(found["loss"]) for found in expected)
    logits = continued(model, case) if generates else None
    patch_model(model, "none")
    assert patched_layers(model)
    for batch, found in zip(batches(case), expected, strict=True):
        assert_identical(step(model, batch), found)
    assert not generates or torch.equal(continued(model, case), logits)
    assert fingerprint(unpatch_model(model)) == before
    assert_identical(step(model, batch), expected[-1])


def test_none_changes_nothing_for_eager(case):
    """Also in bfloat16, where the position of casts matters."""
    model, batch = made(case), batches(case)[0]
    if model.config._attn_implementation != "eager":
        model.set_attn_implementation("eager")
    expected = step(model, batch)
    patch_model(model, "none")
    assert_identical(step(model, batch), expected)
    if case not in EVERY:
        model.to(torch.bfloat16)
        with torch.no_grad():
            assert torch.equal(model(**batch).logits, unpatch_model(model)(**batch).logits)


def normed_and_capped(model: PreTrainedModel, case: str) -> Scheme:
    """Patch the model with the norms and cap that it takes."""
    scheme = replace(SCHEMES["qk_norm_cap" if takes(case, "qk_norm_cap") else "soft_cap"], softcap=2.0)
    if case in EVERY and scheme.norms:
        scheme = replace(scheme, q="layer", k="layer")
    randomise(patch_model(model, scheme), knee=4.0)
    return scheme


def test_norm_and_cap(case):
    """It trains every new parameter, generates the same with a cache, and is unpatched."""
    model, batch = made(case), batches(case)[-1 if case in EVERY else 0]
    before, expected = fingerprint(model), step(model, batch)
    scheme = normed_and_capped(model, case)
    result = step(model, batch)
    assert all(torch.isfinite(x).all() for x in result.values())
    assert (result["logits"] - expected["logits"]).abs().max() > 1e-3, "norm and cap act"
    added = result.keys() - expected.keys()
    if case in EVERY:  # a decoder alone attends to no encoder
        assert len(added) == sum(len([*norm.parameters()]) for norm in every_norm(model))
    assert bool(added) == bool(scheme.norms)
    assert all(result[name].abs().max() > 0 for name in added)
    if (case not in EVERY or case in CONTINUED) and case not in CHANCE:
        assert_near(continued(model, case), continued(model, case, use_cache=False), TOLERANCE)
    assert fingerprint(unpatch_model(model)) == before
    assert_identical(step(model, batch), expected)


def test_it_saves_and_loads(saved, tmp_path):
    model, batch = made(saved), batches(saved)[-1 if saved in EVERY else 0]
    normed_and_capped(model, saved)
    auto = type(model) if saved not in EVERY else getattr(transformers, EVERY[saved][1])
    auto = type(model) if issubclass(auto, PreTrainedModel) else auto
    model.save_pretrained(tmp_path)
    again = auto.from_pretrained(tmp_path)
    assert type(again) is type(model) is derived_model(type(model).base_class)
    assert again.config.scheme == model.config.scheme
    assert [norm.shape for norm in every_norm(again)] == [norm.shape for norm in every_norm(model)]
    with torch.no_grad():
        assert_near(seen(again, batch), seen(model, batch), 1e-6)


@torch.no_grad()
def test_steps_without_positions(lm):
    """They continue the count of the cached tokens."""
    model, ids = made(lm), make_batch("plain", labels=False)["input_ids"]
    patch_model(model, "qk_norm_cap" if takes(lm, "qk_norm_cap") else "soft_cap")
    prompt = model(ids[:, :16], use_cache=True)
    if CACHE not in prompt or lm in CHANCE:
        pytest.skip("it returns no cache, or selects keys by chance")
    steps = [model(token, **{CACHE: prompt[CACHE], "use_cache": True}).logits for token in ids[:, 16:].split(1, 1)]
    assert_near(torch.cat(steps, 1), model(ids, use_cache=False).logits[:, 16:], TOLERANCE)


def test_backends_agree(case):
    """Windows, sinks and masks reach the package's attention as they reach the model's own."""
    model, backends = made(case), BACKENDS if case in EVERY else BACKENDS[:2]
    for batch in batches(case)[: None if case in EVERY else 1]:
        batch = {name: x for name, x in batch.items() if name != "labels" or case in EVERY and case not in OWN_INPUTS}
        assert_backends_agree(model, partial(seen, model, batch), TOLERANCE, backends)


@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_what_each_token_sees(alone, backend):
    """The first output moves with the last input, unless the model is causal; padding moves nothing."""
    model_type = type_of(alone)
    model = patch_model(made(alone), "qk_norm_cap", attn_implementation=backend).base_model
    changed = batch = {name: x for name, x in batches(alone)[-1].items() if name != "labels"}
    if model_type in IMAGES:
        changed = batch | {"pixel_values": batch["pixel_values"].clone()}
        changed["pixel_values"][..., -4:, -4:] += 1
    else:
        assert (batch["attention_mask"][0, -6:] == 0).all()
        changed = batch | {"input_ids": batch["input_ids"].clone()}
        changed["input_ids"][0, -6:] = 7
        assert_near(seen(model, changed), seen(model, batch), 1e-6, "padding")
        changed["input_ids"][1, -1] += 1
    moved = (out_of(model(**changed)) - out_of(model(**batch)))[1 if model_type not in IMAGES else 0, 0].abs().max()
    assert (moved > 1e-5) != FAMILIES[model_type].is_causal(model.config)


@torch.no_grad()
def test_what_kernels_rotate(lm, monkeypatch):
    """The angles that kernels are given turn heads as the model does."""
    family = FAMILIES[type_of(lm)]
    if family.rope is None or family.runs_own_forward(config_of(lm)):
        pytest.skip("only the model's own code rotates it")
    plain, seen = PlainAttention.norm_rotate, []

    def rotate(layer: QKNormAttention, q: Tensor, k: Tensor, *rest: Any) -> Any:
        _, positions, cache, options = rest
        if positions is not None:
            rotary = kernel_rotary(positions, layer.family.rope)
            expected = layer.family.style.rotate(layer, q, k, k, positions, past_key_values=cache, **options)
            for x, y in zip((q, k), expected, strict=False):
                assert_near(turned(x, rotary), y, 1e-6)
            seen.append(rotary)
        return plain(layer, q, k, *rest)

    monkeypatch.setattr(PlainAttention, "norm_rotate", rotate)
    patch_model(made(lm), "none")(**make_batch("left"))
    assert seen or lm.endswith("-unrotated") or not hasattr(config_of(lm), "rope_parameters")


def turned(x: Tensor, rotary: Rotary) -> Tensor:
    """x `[B, H, T, D]` with its first R channels rotated, in halves or in pairs of neighbours."""
    cos, sin = rotary.cos[:, None], rotary.sin[:, None]
    part, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
    if rotary.interleaved:
        a, b = part[..., ::2], part[..., 1::2]
        return torch.cat([torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2), rest], -1)
    a, b = part.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


@torch.no_grad()
def test_the_norm_before_attention_is_folded(case):
    """qkv_norm removes the norm: no other module reads it, and `as_unpatched` restores the model's result."""
    if not takes(case, "qkv_norm"):
        pytest.skip("takes no qkv_norm")
    model, batch = made(case), batches(case)[-1 if case in EVERY else 0]
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or ".bias" in name:  # biases fold but for σ
            parameter.zero_()
        elif parameter.dim() == 1:
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    expected = seen(model, batch)
    patch_model(model, "qkv_norm")
    assert all({"q_norm", "k_norm", "v_norm"} == head_norms(layer).keys() for layer in patched_layers(model).values())
    with as_unpatched(model):
        assert_near(seen(model, batch), expected, 1e-3)
