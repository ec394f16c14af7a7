"""Patched models through the kernels, against the same models through eager: in training and with caches.

Attention by the fused kernels, and norm and RoPE in a kernel in front of every attention function.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DynamicCache, StaticCache

from qknorm_tests.covering import covering
from qknorm_tests.tables import BATCHES, applies, assert_same, sharp_model

pytest.importorskip("triton", reason="needs Triton, which comes with torch on CUDA and with the test extra")
from hf_qknorm import SCHEMES, Scheme, patch_model, set_knee
from hf_qknorm.attend.functions import REGISTERED
from hf_qknorm.families.style import CACHE
from hf_qknorm.model import raw_heads
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.ops import library, reference
from hf_qknorm.ops.triton import attention as triton_attention
from hf_qknorm.ops.triton import norm_rope
from qknorm_tests.error_budget import error
from qknorm_tests.kernel_models import DEVICE, OTHERS, batch, counted, outputs, patched
from qknorm_tests.random_qkv import make_qkv
from qknorm_tests.slow import slow_but

TYPES = ("llama", "gpt2", "gpt_neox", "mistral", "gemma2")  # plain, no RoPE, partial RoPE, windows, caps and windows
CASES = [
    *covering(
        TYPES, SCHEMES, BATCHES, fits=lambda t, name, _: name != "none" and applies(t, SCHEMES[name]), strength=1
    ),
    *(("llama", scheme, "left") for scheme in ("knee", *OTHERS)),
    ("mimo_v2_flash", "qk_norm_cap", "left"),  # narrow values
    ("deepseek_v3", "soft_cap", "plain"),
]


@pytest.mark.parametrize(("model_type", "scheme", "kind"), CASES)
def test_the_kernels_give_what_eager_gives(
    model_type: str, scheme: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a cache, which is transformers' default, results are the same, and the norm is in the kernel."""
    model = patched(model_type, scheme)
    expected = outputs(model, "hf_qknorm_eager", kind)
    calls: list[Any] = []
    monkeypatch.setattr(triton_attention, "forward", counted(triton_attention.forward, calls))
    got = outputs(model, "hf_qknorm_triton", kind)
    assert_same(got, expected)
    assert len(calls) == len(patched_layers(model))
    if (model_type, scheme) == ("llama", "knee"):
        monkeypatch.setattr(library, "fused_attention", counted(library.fused_attention, fused := []))
        cached = outputs(model, "hf_qknorm_triton", kind, use_cache=True)
        assert fused[0][0].q_norm.gain is not None
        assert all(torch.equal(cached[name], value) for name, value in got.items())


WIDTHS = [(16, 8), (8, 16), (12, 4)]


@pytest.mark.parametrize(
    ("widths", "backend", "scaling"),
    covering(WIDTHS, ["hf_qknorm_triton", "hf_qknorm_tiled", "hf_qknorm_eager"], [None, 0.7]),
)
def test_values_of_another_width(widths: tuple[int, int], scaling: float | None, backend: str) -> None:
    """The scale follows from the queries' own width, not from the padded one."""
    width, width_v = widths
    q, k, v = (x.detach().to(DEVICE) for x in make_qkv(1, 4, 2, 9, 9, max(width, width_v)))
    q, k, v = q[..., :width], k[..., :width], v[..., :width_v]
    got, _ = REGISTERED[backend](torch.nn.Module(), q, k, v, None, scaling=scaling, softcap=5.0)
    expected = reference.attention(q, k, v, scale=scaling or width**-0.5, softcap=5.0, causal=True).out
    torch.testing.assert_close(got, expected.transpose(1, 2))


def test_a_norm_sees_no_padding_where_values_are_wider(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch_model(
        sharp_model("llama", num_hidden_layers=1), Scheme(q="rms", k="layer", bias=False, softcap=5.0)
    ).to(DEVICE)
    (layer,) = patched_layers(model).values()
    width = layer.head_dim
    q, k, v = (x.detach().to(DEVICE) for x in make_qkv(1, 4, 2, 9, 9, 2 * width))
    cos, sin = (torch.rand(1, 9, width // 2, device=DEVICE).repeat(1, 1, 2) for _ in range(2))
    heads = q[..., :width], k[..., :width], v
    style = replace(
        layer.family.style,
        project=lambda *_, **options: tuple(x.transpose(1, 2) for x in heads),
        output=lambda module, out: out,
    )
    monkeypatch.setattr(type(layer), "family", replace(layer.family, style=style))
    found = []
    for backend in ("hf_qknorm_triton", "hf_qknorm_tiled", "hf_qknorm_eager"):
        model.set_attn_implementation(backend)
        found.append(layer(torch.zeros(1, 9, 1), position_embeddings=(cos, sin), **{CACHE: DynamicCache()})[0])
    for got in found[:2]:
        torch.testing.assert_close(got, found[2])


def test_a_norm_with_a_hook_runs_as_a_module() -> None:
    model = patched("llama", "qk_norm_cap")
    seen = []
    next(iter(patched_layers(model).values())).q_norm.register_forward_hook(lambda *_: seen.append(1))
    assert_same(outputs(model, "hf_qknorm_triton", "plain"), outputs(model, "hf_qknorm_eager", "plain"))
    assert len(seen) == 2


def test_a_knee_may_move_between_the_passes() -> None:
    model, found = patched("llama", "knee"), []
    model.set_attn_implementation("hf_qknorm_triton")
    for moved in (False, True):
        model.zero_grad()
        loss = model(**batch("plain"), use_cache=False).loss
        if moved:
            set_knee(model, 0.25)
        loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert_same(*found)


@pytest.mark.slow
def test_one_compiled_graph_is_the_plain_model_at_every_knee() -> None:
    model = patched("llama", "knee")
    model.set_attn_implementation("hf_qknorm_triton")
    torch._dynamo.reset()
    counter, logits = CompileCounterWithBackend("aot_eager"), []
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    tokens = batch("left", labels=False) | {"use_cache": False}
    for knee in (4.0, 0.5):
        set_knee(model, knee)
        found = []
        for each in (compiled, model):
            model.zero_grad()
            logits.append(each(**tokens).logits)
            logits[-1].sin().sum().backward()
            found.append({"logits": logits[-1].detach(), **{name: p.grad for name, p in model.named_parameters()}})
        assert_same(*found)
    assert counter.frame_count == 1
    assert error(*(x.detach() for x in logits[::2])) > 0.01


def test_autocast_attends_in_bf16() -> None:
    model = patched("llama", "qk_norm_cap")
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        results = [outputs(model, backend, "plain") for backend in ("hf_qknorm_triton", "hf_qknorm_eager")]
    for name, expected in results[1].items():
        assert error(results[0][name], expected) < 0.05, name


def test_calls_that_the_kernels_do_not_take_are_refused_with_the_reason() -> None:
    model = patched("llama", "qk_norm_cap")
    model.set_attn_implementation("hf_qknorm_triton")
    tokens = batch("plain")["input_ids"]
    length = tokens.shape[1]
    holes = torch.ones(1, 1, length, length, dtype=torch.bool, device=DEVICE).tril()
    holes[:, :, 5:, 3] = False
    with pytest.raises(ValueError, match="hf_qknorm_triton.*arbitrary one.*set_attn_implementation"):
        model(tokens, attention_mask=holes, use_cache=False)
    with pytest.raises(ValueError, match=r"hf_qknorm_triton.*got torch\.float64"):
        model.double()(tokens, use_cache=False)


def test_gradients_flow_through_the_cache() -> None:
    """Cached keys of a first pass with gradients carry them into the next pass."""
    model = patched("llama", "qk_norm_cap")
    first, rest = batch("plain")["input_ids"].split([7, 13], 1)
    found = []
    for backend in ("hf_qknorm_triton", "hf_qknorm_eager"):
        model.set_attn_implementation(backend)
        model.zero_grad()
        logits = model(rest, **{CACHE: model(first, use_cache=True)[CACHE]}).logits
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
@pytest.mark.parametrize(("model_type", "kind", "make"), slow_but(PIECES[:2], PIECES), ids=[x[1] for x in PIECES])
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
            places = torch.arange(start, start + size, device=DEVICE)[None]
            pieces.append(run(tokens[:, start : start + size], position_ids=places, **{CACHE: cache}).logits)
            start += size
            if kind == "compiled" and run is model:
                torch._dynamo.reset()
                run = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(torch.cat(pieces, 1), whole[:, :start], rtol=1e-4, atol=1e-4)
        cache.reset()


BACKENDS = ["sdpa", "eager", "hf_qknorm_eager", "hf_qknorm_tiled", *(["flex_attention"] if DEVICE == "cuda" else [])]
Results = dict[str, Tensor]


def evaluated(model: Any, backend: str) -> Results:
    """Logits without gradients: flex attention has none on a CPU, and runs there without its compiler."""
    model.set_attn_implementation(backend)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        return {"logits": model(**batch("plain", labels=False), use_cache=False).logits}


def generated(model: Any, backend: str, cache: str) -> Results:
    """Logits of greedy tokens."""
    model.set_attn_implementation(backend)
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "disable_compile": True}
    settings |= {"return_dict_in_generate": True, "cache_implementation": cache}
    return {"logits": torch.stack(model.generate(**batch("left", labels=False), **settings).logits)}


def assert_fused(compute: Callable[[], Results], monkeypatch: pytest.MonkeyPatch, **passes: int) -> None:
    """Norm and RoPE by the kernel, as on CUDA, compute the same as without, in so many passes of the kernel."""
    monkeypatch.setattr(raw_heads, "device_type", lambda x: "meta")
    expected, seen = compute(), []
    monkeypatch.setattr(raw_heads, "device_type", lambda x: "cuda")
    for name in ("forward", "backward"):
        calls: list[Any] = []
        monkeypatch.setattr(norm_rope, name, counted(getattr(norm_rope, name), calls))
        seen.append((name, calls))
    assert_same(compute(), expected)
    assert {name: len(calls) for name, calls in seen if calls} == passes


@pytest.mark.parametrize(
    ("model_type", "backend"), covering(["llama", "gpt2", "phi3", "gpt_neox"], BACKENDS, strength=1)
)
def test_norms_in_a_kernel_train(model_type: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = patched(model_type, "qk_norm")
    assert_fused(lambda: outputs(model, backend, "right"), monkeypatch, forward=1, backward=1)


@pytest.mark.parametrize(
    ("model_type", "scheme", "backend", "cache", "passes"),
    [
        ("llama", "knee", "sdpa", "dynamic", 8),  # its values have a norm, too
        ("glm", "qk_norm", "hf_qknorm_tiled", "dynamic", 4),
        ("gpt_neox", "qk_norm_cap", "hf_qknorm_eager", "static", 4),
        ("llama", "qk_norm_cap", "hf_qknorm_triton", "static", 4),
        ("llama", "qk_norm_cap", "hf_qknorm_triton", "dynamic", 5),  # raw heads first, and their keys for the cache
    ],
)
def test_norms_in_a_kernel_generate(
    model_type: str, scheme: str, backend: str, cache: str, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = patched(model_type, scheme)
    assert_fused(lambda: generated(model, backend, cache), monkeypatch, forward=passes)


@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")  # of transformers
def test_models_of_two_families_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each keeps its own rotation: Llama turns halves of a head, GLM neighbours in a part of it."""
    models = [patched(model_type, "qk_norm").eval() for model_type in ("llama", "glm")]
    for model in (*models, models[0]):
        with monkeypatch.context() as patch:
            assert_fused(lambda model=model: evaluated(model, "flex_attention"), patch, forward=1)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable:FutureWarning")
def test_norms_in_a_kernel_under_gradient_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward pass runs twice."""
    model = patched("llama", "qk_norm_cap").train()
    model.gradient_checkpointing_enable()
    assert_fused(lambda: outputs(model, "hf_qknorm_tiled", "plain"), monkeypatch, forward=2, backward=1)


@pytest.mark.parametrize(
    ("model_type", "scheme"), [("llama", "none"), ("deepseek_v3", "soft_cap"), ("qwen3", "soft_cap")]
)
def test_layers_without_norms_of_the_scheme_keep_the_models_own(
    model_type: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = patch_model(sharp_model(model_type, num_hidden_layers=1), scheme, attn_implementation="hf_qknorm_eager")
    assert_fused(lambda: evaluated(model.to(DEVICE), "hf_qknorm_eager"), monkeypatch)
