"""Patched models through the fused kernels, with caches and in generation."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from qknorm_tests.slow import slow_but

pytest.importorskip("triton", reason="needs Triton, which comes with torch on CUDA and with the test extra")
from hf_qknorm.families.style import CACHE
from hf_qknorm.model import raw_heads
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.ops import library
from qknorm_tests.kernel_models import DEVICE, assert_same, batch, counted, outputs, patched
from qknorm_tests.tiny import tiny_config


def saved(model, **options: Any) -> Counter[tuple[Any, ...]]:  # type: ignore[no-untyped-def]
    """Shapes and dtypes of the tensors that a forward pass keeps for backward, without the parameters; each once."""
    parameters = {p.data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        if x.data_ptr() not in parameters:
            kept[x.data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = model(**batch("left"), **options)
    del result
    return Counter((tuple(x.shape), x.dtype) for x in kept.values())


@pytest.mark.costly
@pytest.mark.parametrize(("model_type", "scheme"), [("llama", "qk_norm_cap"), ("mistral", "qk_norm")])
def test_a_cache_changes_nothing_in_training(model_type: str, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the default `use_cache=True`, results, gradients and tensors kept for backward are the same."""
    model = patched(model_type, scheme)
    expected = outputs(model, "hf_qknorm_triton", "left")
    calls: list[Any] = []
    monkeypatch.setattr(library, "fused_attention", counted(library.fused_attention, calls))
    got = outputs(model, "hf_qknorm_triton", "left", use_cache=True)
    assert len(calls) == len(patched_layers(model))
    assert calls[0][0].q_norm.gain is not None, "the norm is in the kernel"
    assert all(torch.equal(got[name], value) for name, value in expected.items())
    assert saved(model, use_cache=True) == saved(model, use_cache=False)


def test_gradients_flow_through_the_cache() -> None:
    """Cached keys of a first pass with gradients carry them into the next pass."""
    model = patched("llama", "qk_norm_cap")
    first, rest = batch("plain")["input_ids"].split([7, 13], 1)
    found = []
    for backend in ("hf_qknorm_triton", "hf_qknorm_eager"):
        model.set_attn_implementation(backend)
        model.zero_grad()
        cache = model(first, use_cache=True)[CACHE]
        logits = model(rest, **{CACHE: cache}).logits
        logits.sin().sum().backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append({"logits": logits.detach(), **grads})
    assert_same(*found)


def caches(config: Any) -> dict[str, Any]:
    return {
        "dynamic": DynamicCache(),
        "of the config": DynamicCache(config=config),  # with sliding layers
        "static": StaticCache(config, max_cache_len=32),
        "just long enough": StaticCache(config, max_cache_len=20),
    }


PIECES = [*(("mistral", kind) for kind in caches(tiny_config("mistral"))), ("llama", "static")]


@pytest.mark.costly
@pytest.mark.parametrize(("model_type", "kind"), slow_but(PIECES[1:3], PIECES))
@torch.no_grad()
def test_a_full_pass_in_pieces(model_type: str, kind: str) -> None:
    """The first piece fills the cache, beside the fused kernels; the others read it."""
    model = patched(model_type, "qk_norm_cap")
    tokens = batch("plain")["input_ids"]
    model.set_attn_implementation("hf_qknorm_triton")
    whole = model(tokens, use_cache=False).logits
    cache = caches(model.config)[kind]
    pieces = [model(piece, **{CACHE: cache}).logits for piece in tokens.split([6, 1, 7, 1, 5], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.costly
@torch.no_grad()
def test_compiled_steps_into_a_static_cache() -> None:
    """The first pass allocates the cache; then one graph writes to it and counts its keys."""
    model = patched("llama", "qk_norm_cap")
    model.set_attn_implementation("hf_qknorm_triton")
    tokens = batch("plain")["input_ids"]
    whole = model(tokens, use_cache=False).logits
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    cache = StaticCache(model.config, max_cache_len=32)
    pieces = [model(tokens[:, :6], **{CACHE: cache}).logits]
    for i in range(6, 9):
        places = torch.full((2, 1), i, device=DEVICE)
        pieces.append(compiled(tokens[:, i : i + 1], **{CACHE: cache}, position_ids=places).logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole[:, :9], rtol=1e-4, atol=1e-4)


@pytest.mark.costly
@torch.no_grad()
def test_a_cache_that_was_reset_or_cut_back_is_used_anew() -> None:
    model = patched("llama", "qk_norm_cap")
    model.set_attn_implementation("hf_qknorm_triton")
    tokens = batch("plain")["input_ids"]
    expected = model(tokens, use_cache=False).logits
    for cache in (caches(model.config)[kind] for kind in ("of the config", "static")):
        model(tokens[:, 4:], **{CACHE: cache})
        cache.reset()
        if cache.get_seq_length():
            continue  # transformers 5.17 keeps the keys of a dynamic cache, as zeros
        torch.testing.assert_close(model(tokens, **{CACHE: cache}).logits, expected, rtol=1e-4, atol=1e-4)
    cache = DynamicCache()
    model(tokens[:, :5], **{CACHE: cache})
    cache.crop(-5)
    torch.testing.assert_close(model(tokens, **{CACHE: cache}).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(DEVICE == "cuda", reason="there an assertion on the device ends the process")
@pytest.mark.parametrize("backend", ["hf_qknorm_triton", "hf_qknorm_tiled"])
@torch.no_grad()
def test_a_token_beyond_a_static_cache_is_an_error(backend: str) -> None:
    """transformers' own update raises IndexError, too. The cache stays as it was."""
    model = patched("llama", "qk_norm_cap")
    model.set_attn_implementation(backend)
    tokens = batch("plain")["input_ids"][:, :9]
    cache = StaticCache(model.config, max_cache_len=8)
    model(tokens[:, :8], **{CACHE: cache})
    before = [x.clone() for x in (cache.layers[0].keys, cache.layers[0].values)]
    with pytest.raises(IndexError, match="out of|no room"):
        model(tokens[:, 8:], **{CACHE: cache}, position_ids=torch.tensor([[8]]))
    assert torch.equal(cache.layers[0].keys, before[0])
    assert torch.equal(cache.layers[0].values, before[1])
    with pytest.raises(IndexError, match="out of|no room"):
        model(tokens, **{CACHE: StaticCache(model.config, max_cache_len=8)})


@pytest.mark.costly
@torch.no_grad()
def test_a_static_cache_takes_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in sampling from a model that trains."""
    model = patched("llama", "qk_norm_cap").train()
    for layer in patched_layers(model).values():
        layer.attention_dropout = 0.5
    model.set_attn_implementation("hf_qknorm_triton")
    tokens, outs = batch("plain")["input_ids"][:, :9], []
    for seed in (0, 0, 1):
        cache = StaticCache(model.config, max_cache_len=16)
        model(tokens[:, :8], **{CACHE: cache})
        torch.manual_seed(seed)
        outs.append(model(tokens[:, 8:], **{CACHE: cache}).logits)
        assert int(cache.layers[0].cumulative_length) == 9
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


@pytest.mark.parametrize(
    ("model_type", "scheme", "cache"),
    [
        ("llama", "qk_norm_cap", "dynamic"),
        ("llama", "qk_norm_cap", "static"),
        ("llama", "knee", "static"),
        ("gpt_neox", "qk_norm_cap", "static"),
    ],
)
def test_generation_with_a_cache(model_type: str, scheme: str, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = patched(model_type, scheme)
    calls: list[Any] = []
    monkeypatch.setattr(raw_heads, "device_type", lambda x: "cuda")  # where kernels norm and rotate
    monkeypatch.setattr(library, "norm_rope", counted(library.norm_rope, calls))
    prompt = batch("left", labels=False)
    settings = {
        "cache_implementation": cache,
        "disable_compile": True,
        "max_new_tokens": 4,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    found = []
    for backend in ("hf_qknorm_triton", "hf_qknorm_eager"):
        model.set_attn_implementation(backend)
        found.append(model.generate(**prompt, **settings))
    steps = [heads.q.shape[2] for (heads,) in calls]  # the first one of a growing cache takes raw heads
    assert steps.count(1) == 6
    assert len(steps) == (8 if cache == "static" else 7)
    assert torch.equal(found[0].sequences, found[1].sequences)
    for got, expected in zip(found[0].logits, found[1].logits, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("choice", [{"num_beams": 2}, {"prompt_lookup_num_tokens": 2}], ids=["beams", "lookup"])
def test_generation_that_chooses_among_tokens(choice: dict[str, int]) -> None:
    """The cache is reordered, or cut back where guessed tokens are wrong."""
    model = patched("llama", "qk_norm_cap")
    tokens = batch("plain")["input_ids"][:1, :6]
    prompt = torch.cat([tokens, tokens[:, :4]], 1)
    found = []
    for backend in ("hf_qknorm_triton", "hf_qknorm_eager"):
        model.set_attn_implementation(backend)
        settings = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
        found.append(model.generate(prompt, **settings, **choice))
    assert torch.equal(found[0].sequences, found[1].sequences)
    for got, expected in zip(found[0].scores, found[1].scores, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
