"""Patched models through the fused kernels, interpreted where there is no GPU, against the same through eager."""

from collections import Counter
from typing import Any

import pytest
import torch
from tables import BATCHES, KNEES, MODEL_TYPES, TRIED, make_batch, randomise, sharp_model
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DynamicCache, StaticCache

pytest.importorskip("triton", reason="needs Triton, which comes with torch on CUDA and with the test extra")
import interpreter
from tiny import tiny_config

from hf_qknorm import FAMILIES, SCHEMES, Scheme, patch_model
from hf_qknorm.backends.functions import REGISTERED
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.knees import powers_of, put_knee
from hf_qknorm.ops import reference
from hf_qknorm.ops.operators import FUSED_ATTENTION, NORM_ROPE_INTO
from hf_qknorm.testing import error, make_qkv
from hf_qknorm.training.blend import set_blend

interpreter.install()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def batch(kind: str, **options: bool) -> dict[str, Any]:
    found = make_batch(kind, **options)
    return {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in found.items()}


def outputs(  # type: ignore[no-untyped-def]
    model, backend: str, kind: str, use_cache: bool = False
) -> dict[str, Tensor]:
    """Logits, loss and every gradient."""
    model.set_attn_implementation(backend)
    model.zero_grad()
    result = model(**{**batch(kind), "use_cache": use_cache})
    result.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": result.logits.detach(), "loss": result.loss.detach(), **grads}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=2e-4, atol=2e-5 * float(value.abs().max()) + 1e-7, msg=name)


def patched(model_type: str, scheme: str):  # type: ignore[no-untyped-def]
    layers = 2 if model_type in ("gemma2", "mimo_v2_flash") else 1  # these have layers that differ
    model = sharp_model(model_type, num_hidden_layers=layers)
    randomise(patch_model(model, {**TRIED, **OTHERS}[scheme], attn_implementation="hf_qknorm_eager"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # gains of one hide mistakes, of the model's own norms too
        for name, p in model.named_parameters():
            if "_norm." in name and "self_attn" in name:
                p.add_(0.3 * torch.randn(p.shape, generator=generator))
    return model.to(DEVICE)


OTHERS = {
    "l2, knee": Scheme(q="l2", k="l2", scale=8.0, gain="per_head", softcap=50.0, knee=0.5),
    "lp, knee": Scheme(q="lp", k="lp", p=3.0, scale=8.0, knee=8.0),
}
CASES = [
    *((family, "qk_norm_cap" if not FAMILIES[family].own_norms else "soft_cap", "plain") for family in MODEL_TYPES),
    *(("llama", name, "plain") for name in SCHEMES if name not in ("qk_norm_cap", "none")),
    *(("mistral", "qk_norm_cap", kind) for kind in BATCHES if kind != "plain"),
    *((family, scheme, "plain") for family, scheme in KNEES),
    *(("llama", scheme, "left") for scheme in OTHERS),
    ("gpt2", "qkv_norm", "left"),
    ("mimo_v2_flash", "qk_norm_cap", "left"),  # narrow values
    ("deepseek_v3", "soft_cap", "plain"),
]


@pytest.mark.parametrize(("model_type", "scheme", "kind"), CASES)
def test_the_kernels_give_what_eager_gives(
    model_type: str, scheme: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = patched(model_type, scheme)
    expected = outputs(model, "hf_qknorm_eager", kind)
    calls = []
    monkeypatch.setattr(FUSED_ATTENTION, "overload", counted(FUSED_ATTENTION.overload, calls))
    assert_same(outputs(model, "hf_qknorm_triton", kind), expected)
    assert len(calls) == len(patched_layers(model))


WIDTHS = [(16, 8), (8, 16), (16, 24), (12, 4)]


@pytest.mark.parametrize("backend", ["hf_qknorm_triton", "hf_qknorm_tiled", "hf_qknorm_eager"])
@pytest.mark.parametrize(("width", "width_v"), WIDTHS)
@pytest.mark.parametrize("scaling", [None, 0.7])
def test_values_of_another_width(width: int, width_v: int, scaling: float | None, backend: str) -> None:
    """The scale is of the queries' own width, whatever they are padded to."""
    q, k, v = (x.detach().to(DEVICE) for x in make_qkv(1, 4, 2, 9, 9, max(width, width_v)))
    q, k, v = q[..., :width], k[..., :width], v[..., :width_v]
    got, _ = REGISTERED[backend](torch.nn.Module(), q, k, v, None, scaling=scaling, softcap=5.0)
    expected = reference.attention(q, k, v, scale=scaling or width**-0.5, softcap=5.0, causal=True).out
    torch.testing.assert_close(got, expected.transpose(1, 2))


@pytest.mark.parametrize("gain", ["none", "shared"])
def test_a_norm_sees_no_padding_where_values_are_wider(gain: str) -> None:
    model = patch_model(
        sharp_model("llama", num_hidden_layers=1), Scheme(q="rms", k="layer", gain=gain, bias=False, softcap=5.0)
    ).to(DEVICE)
    (layer,) = patched_layers(model).values()
    width = layer.head_dim
    q, k, v = (x.detach().to(DEVICE) for x in make_qkv(1, 4, 2, 9, 9, 2 * width))
    cos, sin = (torch.rand(1, 9, width // 2, device=DEVICE).repeat(1, 1, 2) for _ in range(2))
    found = []
    for backend in ("hf_qknorm_triton", "hf_qknorm_tiled", "hf_qknorm_eager"):
        model.set_attn_implementation(backend)
        options = {"scaling": layer.logit_scale, "softcap": 5.0}
        found.append(
            layer._norm_rotate_attend(q[..., :width], k[..., :width], v, None, (cos, sin), DynamicCache(), options)[0]
        )
    for got in found[:2]:
        torch.testing.assert_close(got, found[2])


def counted(function, calls: list):  # type: ignore[no-untyped-def]
    def call(*arguments):  # type: ignore[no-untyped-def]
        calls.append(arguments)
        return function(*arguments)

    return call


def test_norms_on_their_way_in_are_blended_in_the_kernel() -> None:
    model = patched("llama", "qk_norm_cap")
    set_blend(model, 0.4)
    assert_same(outputs(model, "hf_qknorm_triton", "right"), outputs(model, "hf_qknorm_eager", "right"))


def test_a_watched_norm_runs_as_a_module() -> None:
    model = patched("llama", "qk_norm_cap")
    seen = []
    next(iter(patched_layers(model).values())).q_norm.register_forward_hook(lambda *_: seen.append(1))
    assert_same(outputs(model, "hf_qknorm_triton", "plain"), outputs(model, "hf_qknorm_eager", "plain"))
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("model_type", "kind", "use_cache"),
    [("llama", "plain", False), ("llama", "plain", True), ("mistral", "left", False), ("qwen3", "plain", False)],
)
def test_the_compiled_model_is_the_plain_one(model_type: str, kind: str, use_cache: bool) -> None:
    model = patched(model_type, "soft_cap" if FAMILIES[model_type].own_norms else "qk_norm_cap")
    torch._dynamo.reset()
    expected = outputs(model, "hf_qknorm_triton", kind, use_cache)
    got = outputs(torch.compile(model, fullgraph=True, backend="aot_eager"), "hf_qknorm_triton", kind, use_cache)
    assert_same({name.removeprefix("_orig_mod."): x for name, x in got.items()}, expected)


@torch.no_grad()
def test_one_compiled_graph_serves_every_knee() -> None:
    model = patched("llama", "knee")
    model.set_attn_implementation("hf_qknorm_triton")
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    tokens, powers, found = batch("plain")["input_ids"], powers_of(model), []
    for knee in (4.0, 0.5):
        put_knee(model, knee, powers)
        found.append(compiled(tokens, use_cache=False).logits)
        torch.testing.assert_close(found[-1], model(tokens, use_cache=False).logits)
    assert counter.frame_count == 1
    assert error(*found) > 0.01


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_autocast_attends_in_bf16(model_type: str) -> None:
    model = patched(model_type, "soft_cap" if FAMILIES[model_type].own_norms else "qk_norm_cap")
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        results = [outputs(model, backend, "plain") for backend in ("hf_qknorm_triton", "hf_qknorm_eager")]
    for name, expected in results[1].items():
        assert error(results[0][name], expected) < 0.05, name


def saved(model, **options: Any) -> Counter[tuple[Any, ...]]:  # type: ignore[no-untyped-def]
    """Address, shape and dtype of what a forward pass keeps for backward, beside the parameters; each once."""
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


@pytest.mark.parametrize("scheme", ["qk_norm", "qk_norm_cap"])
@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_a_cache_changes_nothing_in_training(model_type: str, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's default is `use_cache=True`: results, gradients and what is kept for backward are those without one."""
    model = patched(model_type, scheme)
    expected = outputs(model, "hf_qknorm_triton", "left")
    calls: list[Any] = []
    monkeypatch.setattr(FUSED_ATTENTION, "overload", counted(FUSED_ATTENTION.overload, calls))
    got = outputs(model, "hf_qknorm_triton", "left", use_cache=True)
    assert len(calls) == len(patched_layers(model))
    assert FUSED_ATTENTION.named(calls[0])["q_gain"] is not None, "the norm is in the kernel"
    assert all(torch.equal(got[name], value) for name, value in expected.items())
    assert saved(model, use_cache=True) == saved(model, use_cache=False)


def test_gradients_flow_through_the_cache() -> None:
    """Keys that a first pass caches under gradients are a function of its weights in the next one."""
    model = patched("llama", "qk_norm_cap")
    first, rest = batch("plain")["input_ids"].split([7, 13], 1)
    found = []
    for backend in ("hf_qknorm_triton", "hf_qknorm_eager"):
        model.set_attn_implementation(backend)
        model.zero_grad()
        cache = model(first, use_cache=True).past_key_values
        logits = model(rest, past_key_values=cache).logits
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


@pytest.mark.parametrize("kind", list(caches(tiny_config("mistral"))))
@pytest.mark.parametrize("model_type", ["llama", "mistral"])
@torch.no_grad()
def test_a_full_pass_in_pieces(model_type: str, kind: str) -> None:
    """Each piece after the first sees a cache; the first one fills it, beside the fused kernels."""
    model = patched(model_type, "qk_norm_cap")
    tokens = batch("plain")["input_ids"]
    model.set_attn_implementation("hf_qknorm_triton")
    whole = model(tokens, use_cache=False).logits
    cache = caches(model.config)[kind]
    pieces = [model(piece, past_key_values=cache).logits for piece in tokens.split([6, 1, 7, 1, 5], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_compiled_steps_into_a_static_cache() -> None:
    """The first pass makes the cache; then one graph writes to it, and counts."""
    model = patched("llama", "qk_norm_cap")
    model.set_attn_implementation("hf_qknorm_triton")
    tokens = batch("plain")["input_ids"]
    whole = model(tokens, use_cache=False).logits
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    cache = StaticCache(model.config, max_cache_len=32)
    pieces = [model(tokens[:, :6], past_key_values=cache).logits]
    for i in range(6, 9):
        places = torch.full((2, 1), i, device=DEVICE)
        pieces.append(compiled(tokens[:, i : i + 1], past_key_values=cache, position_ids=places).logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole[:, :9], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_cache_that_was_reset_or_cut_back_is_used_anew() -> None:
    model = patched("llama", "qk_norm_cap")
    model.set_attn_implementation("hf_qknorm_triton")
    tokens = batch("plain")["input_ids"]
    expected = model(tokens, use_cache=False).logits
    for cache in caches(model.config).values():
        model(tokens[:, 4:], past_key_values=cache)
        cache.reset()
        torch.testing.assert_close(model(tokens, past_key_values=cache).logits, expected, rtol=1e-4, atol=1e-4)
    cache = DynamicCache()
    model(tokens[:, :5], past_key_values=cache)
    cache.crop(-5)
    torch.testing.assert_close(model(tokens, past_key_values=cache).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(DEVICE == "cuda", reason="there an assertion on the device ends the process")
@pytest.mark.parametrize("backend", ["hf_qknorm_triton", "hf_qknorm_tiled"])
@torch.no_grad()
def test_a_token_beyond_a_static_cache_is_an_error(backend: str) -> None:
    """transformers' own update raises IndexError, too; nothing that the cache holds is changed."""
    model = patched("llama", "qk_norm_cap")
    model.set_attn_implementation(backend)
    tokens = batch("plain")["input_ids"][:, :9]
    cache = StaticCache(model.config, max_cache_len=8)
    model(tokens[:, :8], past_key_values=cache)
    before = [x.clone() for x in (cache.layers[0].keys, cache.layers[0].values)]
    with pytest.raises(IndexError, match="out"):
        model(tokens[:, 8:], past_key_values=cache, position_ids=torch.tensor([[8]]))
    assert torch.equal(cache.layers[0].keys, before[0])
    assert torch.equal(cache.layers[0].values, before[1])
    if backend == "hf_qknorm_triton":
        assert int(cache.layers[0].cumulative_length) == 8
    with pytest.raises(IndexError, match="out"):
        model(tokens, past_key_values=StaticCache(model.config, max_cache_len=8))


@torch.no_grad()
def test_a_cache_of_another_batch_is_refused() -> None:
    model = patched("llama", "qk_norm_cap")
    model.set_attn_implementation("hf_qknorm_triton")
    tokens = batch("plain")["input_ids"]
    cache = StaticCache(model.config, max_cache_len=32)
    model(tokens[:1, :8], past_key_values=cache)
    with pytest.raises(ValueError, match=r"keys \[2, .* do not fit a cache of \[1, .*batch"):
        model(tokens[:, 8:9], past_key_values=cache)


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
    monkeypatch.setattr(NORM_ROPE_INTO, "overload", counted(NORM_ROPE_INTO.overload, calls))
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
    assert len(calls) == (3 if cache == "static" else 0)  # each step but the first, which makes the cache
    assert torch.equal(found[0].sequences, found[1].sequences)
    for got, expected in zip(found[0].logits, found[1].logits, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_what_the_kernels_cannot_do_is_refused_with_the_reason() -> None:
    model = patched("llama", "qk_norm_cap")
    model.set_attn_implementation("hf_qknorm_triton")
    tokens = batch("plain")["input_ids"]
    length = tokens.shape[1]
    holes = torch.ones(2, 1, length, length, dtype=torch.bool, device=DEVICE).tril()
    holes[:, :, 5:, 3] = False
    with pytest.raises(ValueError, match="hf_qknorm_triton.*arbitrary one.*set_attn_implementation"):
        model(tokens, attention_mask=holes, use_cache=False)
    with pytest.raises(ValueError, match=r"hf_qknorm_triton.*got torch\.float64"):
        model.double()(tokens, use_cache=False)


@pytest.mark.skipif(DEVICE == "cuda", reason="there the kernels run")
def test_the_default_backend_never_interprets() -> None:
    model = patched("llama", "qk_norm_cap")
    expected, got = (outputs(model, backend, "plain") for backend in ("hf_qknorm_tiled", "hf_qknorm"))
    assert all(torch.equal(got[name], value) for name, value in expected.items())
