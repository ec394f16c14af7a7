"""Every causal language model that can be patched, patched; `test_refused.py` has the others.

By default one family of each style, and the types that most tests run over, with variants for what a config switches;
`pytest --all-families` runs over all.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from hf_qknorm import FAMILIES, SCHEMES, patch_model, unpatch_model
from hf_qknorm.families.style import CACHE
from hf_qknorm.model.attention import QKNormAttention, every_norm, head_norms, patched_layers
from hf_qknorm.model.derived import derived_model
from hf_qknorm.model.install import as_unpatched
from hf_qknorm.model.layer import QKNormAttention as PlainAttention
from hf_qknorm.model.raw_heads import kernel_rotary
from hf_qknorm.ops.types import Rotary
from qknorm_tests.tables import (
    MODEL_TYPES,
    assert_backends_agree,
    assert_identical,
    assert_near,
    fingerprint,
    make_batch,
    randomise,
    real,
    sharp_model,
    step,
    swept,
    use_backend,
)
from qknorm_tests.tiny import tiny_config

KINDS = ("plain", "left", "right")
NEW = 4
TOLERANCE = 1e-4  # near-identical logits, through two layers and whatever stands beside attention

PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

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


# Doge selects keys by a number for each value; those of equal tokens are equal, and one of them is selected by chance.
CHANCE = ("doge-selecting",)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" not in metafunc.fixturenames:
        return
    cases = [*dict.fromkeys([*MODEL_TYPES, *swept(metafunc.config)])]
    types = cases if metafunc.config.getoption("--all-families") else MODEL_TYPES
    variants = [name for name, (t, _) in VARIANTS.items() if t in types]
    metafunc.parametrize("case", cases + variants)


def made(case: str) -> PreTrainedModel:
    model_type, settings = VARIANTS.get(case, (case, {}))
    return sharp_model(model_type, **{"attention_dropout": 0.1, **settings})


def type_of(case: str) -> str:
    return VARIANTS.get(case, (case, {}))[0]


def config_of(case: str) -> PretrainedConfig:
    model_type, settings = VARIANTS.get(case, (case, {}))
    return tiny_config(model_type, **settings)


def takes(case: str, preset: str) -> bool:
    """Whether a model can have the preset."""
    return FAMILIES[type_of(case)].refusal(config_of(case), SCHEMES[preset]) is None


@torch.no_grad()
def generated(model: PreTrainedModel, kind: str, **options: Any) -> tuple[Tensor, Tensor]:
    """Greedily generated tokens and the logits that they were taken by."""
    out = model.generate(
        **make_batch(kind, labels=False),
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    return out.sequences, torch.stack(out.logits)


def test_none_changes_nothing(case):
    """Training with dropout (loss, logits, gradients) and generation are bit-identical, and again after unpatching."""
    original, patched = made(case), made(case)
    before = fingerprint(patched)
    patch_model(patched, "none")
    assert patched_layers(patched)
    for kind in KINDS:
        expected = step(original, make_batch(kind))
        assert torch.isfinite(expected["loss"])
        assert_identical(step(patched, make_batch(kind)), expected)
    for kind in ("plain", "left"):
        for expected, actual in zip(generated(original, kind), generated(patched, kind), strict=True):
            assert torch.equal(actual, expected)
    assert fingerprint(unpatch_model(patched)) == before
    assert_identical(step(patched, make_batch("left")), step(original, make_batch("left")))


def test_none_changes_nothing_for_eager(case):
    """Also in bfloat16, where the position of casts matters."""
    original, patched = made(case), made(case)
    use_backend("eager", original, patched)
    patch_model(patched, "none")
    assert_identical(step(patched, make_batch("left")), step(original, make_batch("left")))
    with torch.no_grad():
        assert torch.equal(*(model.to(torch.bfloat16)(**make_batch("left")).logits for model in (original, patched)))


def test_norm_and_cap(case, tmp_path):
    """It trains every new parameter, saves and loads, generates the same with a cache, and is unpatched."""
    preset = "qk_norm_cap" if takes(case, "qk_norm_cap") else "soft_cap"
    model, batch = made(case), make_batch("left")
    before, expected = fingerprint(model), step(model, batch)
    randomise(patch_model(model, replace(SCHEMES[preset], softcap=2.0)), knee=4.0)
    result = step(model, batch)
    assert all(x is None or torch.isfinite(x).all() for x in result.values())
    assert (result["logits"] - expected["logits"]).abs().max() > 1e-3, "norm and cap act"
    added = result.keys() - expected.keys()
    assert bool(added) == (preset == "qk_norm_cap")
    assert all(result[name].abs().max() > 0 for name in added)

    if case not in CHANCE:
        tokens, logits = generated(model, "left")
        tokens_uncached, logits_uncached = generated(model, "left", use_cache=False)
        assert torch.equal(tokens, tokens_uncached)
        assert_near(logits, logits_uncached, TOLERANCE)

    copy.deepcopy(model).save_pretrained(tmp_path)  # it writes to the config
    again = copy.deepcopy(type(model).from_pretrained(tmp_path))  # rounding depends on where in the file weights lie
    assert type(again) is type(model) is derived_model(type(model).base_class)
    assert again.config.scheme == model.config.scheme
    assert [norm.shape for norm in every_norm(again)] == [norm.shape for norm in every_norm(model)]
    with torch.no_grad():
        assert torch.equal(again(**batch).logits, model(**batch).logits)

    assert fingerprint(unpatch_model(model)) == before
    assert_identical(step(model, batch), expected)


@torch.no_grad()
def test_steps_without_positions(case):
    """They continue the count of the cached tokens."""
    model, ids = made(case), make_batch("plain", labels=False)["input_ids"]
    patch_model(model, "qk_norm_cap" if takes(case, "qk_norm_cap") else "soft_cap")
    prompt = model(ids[:, :16], use_cache=True)
    if CACHE not in prompt or case in CHANCE:
        pytest.skip("it returns no cache, or selects keys by chance")
    cache = {CACHE: prompt[CACHE], "use_cache": True}
    steps = [model(token, **cache).logits for token in ids[:, 16:].split(1, 1)]
    assert_near(torch.cat(steps, 1), model(ids, use_cache=False).logits[:, 16:], TOLERANCE)


def test_backends_agree(case):
    """Windows, sinks and masks reach the package's attention as they reach the model's own."""
    model, batch = made(case), make_batch("left", labels=False)
    assert_backends_agree(model, lambda: model(**batch).logits[real(batch)], TOLERANCE)


@torch.no_grad()
def test_what_kernels_rotate(case, monkeypatch):
    """The angles that kernels are given turn heads as the model does."""
    family = FAMILIES[type_of(case)]
    if family.rope is None or family.runs_own_forward(config_of(case)):
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
    patch_model(made(case), "none")(**make_batch("left"))
    assert seen or case.endswith("-unrotated") or not hasattr(config_of(case), "rope_parameters")


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
    model, batch = made(case), make_batch("left")
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # biases, which fold but for σ, and gains
            bias = name.endswith("bias") or ".bias" in name
            parameter.copy_(
                torch.zeros(()) if bias else parameter + 0.3 * torch.randn(parameter.shape, generator=generator)
            )
    expected = model(**batch).logits[real(batch)]
    patch_model(model, "qkv_norm")
    assert all({"q_norm", "k_norm", "v_norm"} == head_norms(layer).keys() for layer in patched_layers(model).values())
    with as_unpatched(model):
        assert_near(model(**batch).logits[real(batch)], expected, 1e-3)
