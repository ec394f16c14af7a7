"""Patched models through the fused kernels, with caches and in generation."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

pytest.importorskip("triton", reason="needs Triton, which comes with torch on CUDA and with the test extra")
from hf_qknorm.families.style import CACHE
from hf_qknorm.model import raw_heads
from hf_qknorm.ops import library
from qknorm_tests.kernel_models import DEVICE, assert_same, batch, counted, outputs, patched


def test_a_cache_changes_nothing_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the default `use_cache=True`, results and gradients are the same, and the norm is in the kernel."""
    model = patched("llama", "qk_norm_cap")
    expected = outputs(model, "hf_qknorm_triton", "left")
    calls: list[Any] = []
    monkeypatch.setattr(library, "fused_attention", counted(library.fused_attention, calls))
    got = outputs(model, "hf_qknorm_triton", "left", use_cache=True)
    assert calls[0][0].q_norm.gain is not None
    assert all(torch.equal(got[name], value) for name, value in expected.items())


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


PIECES = [
    ("mistral", "dynamic", lambda config: DynamicCache(config=config)),  # with sliding layers
    ("mistral", "just long enough", lambda config: StaticCache(config, max_cache_len=20)),
    ("llama", "compiled", lambda config: StaticCache(config, max_cache_len=32)),
]


@pytest.mark.costly
@pytest.mark.parametrize(("model_type", "kind", "make"), PIECES, ids=[kind for _, kind, _ in PIECES])
@torch.no_grad()
def test_a_full_pass_in_pieces(model_type: str, kind: str, make: Any) -> None:
    """The first piece fills the cache, beside the fused kernels; the others read it. A reset cache serves again."""
    model = patched(model_type, "qk_norm_cap")
    tokens = batch("plain")["input_ids"]
    model.set_attn_implementation("hf_qknorm_triton")
    whole, cache = model(tokens, use_cache=False).logits, make(model.config)
    sizes = [6, 1, 1] if kind == "compiled" else [6, 1, 7, 1, 5]
    for _ in range(2 if kind == "just long enough" else 1):
        pieces, run, start = [], model, 0
        for size in sizes:
            places = torch.arange(start, start + size, device=DEVICE).expand(2, -1)
            pieces.append(run(tokens[:, start : start + size], position_ids=places, **{CACHE: cache}).logits)
            start += size
            if kind == "compiled" and run is model:
                torch._dynamo.reset()
                run = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(torch.cat(pieces, 1), whole[:, :start], rtol=1e-4, atol=1e-4)
        cache.reset()


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


@pytest.mark.parametrize(
    ("model_type", "scheme", "cache"),
    [("llama", "qk_norm_cap", "dynamic"), ("llama", "knee", "static"), ("gpt_neox", "qk_norm_cap", "static")],
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
