"""Patched models through the fused kernels, interpreted where there is no GPU, against the same through eager."""

from typing import Any

import pytest
import torch
from tables import BATCHES, MODEL_TYPES, make_batch, sharp_model
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton, which comes with torch on CUDA and with the test extra")
import interpreter

from hf_qknorm import FAMILIES, SCHEMES, patch_model
from hf_qknorm.attention import patched_layers
from hf_qknorm.ops import fused
from hf_qknorm.testing import error
from hf_qknorm.training.blend import set_blend

interpreter.install()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def batch(kind: str, **options: bool) -> dict[str, Any]:
    found = make_batch(kind, **options)
    return {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in found.items()}


def outputs(model, backend: str, kind: str) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
    """Logits, loss and every gradient."""
    model.set_attn_implementation(backend)
    model.zero_grad()
    result = model(**{**batch(kind), "use_cache": False})
    result.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": result.logits.detach(), "loss": result.loss.detach(), **grads}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=2e-4, atol=2e-5 * float(value.abs().max()) + 1e-7, msg=name)


def patched(model_type: str, scheme: str):  # type: ignore[no-untyped-def]
    layers = 2 if model_type == "gemma2" else 1  # Gemma 2's layers differ
    model = sharp_model(model_type, num_hidden_layers=layers)
    patch_model(model, scheme, attn_implementation="hf_qknorm_eager")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # gains of one hide mistakes
        for name, p in model.named_parameters():
            if "_norm." in name and "self_attn" in name:
                p.add_(0.3 * torch.randn(p.shape, generator=generator))
    return model.to(DEVICE)


CASES = [
    *((family, "qk_norm_cap" if not FAMILIES[family].own_norms else "soft_cap", "plain") for family in MODEL_TYPES),
    *(("llama", name, "plain") for name in SCHEMES if name not in ("qk_norm_cap", "none")),
    *(("mistral", "qk_norm_cap", kind) for kind in BATCHES if kind != "plain"),
    ("gpt2", "qkv_norm", "left"),
]


@pytest.mark.parametrize(("model_type", "scheme", "kind"), CASES)
def test_the_kernels_give_what_eager_gives(
    model_type: str, scheme: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = patched(model_type, scheme)
    expected = outputs(model, "hf_qknorm_eager", kind)
    calls = []
    monkeypatch.setattr(fused.OPERATORS, "fused_attention", counted(fused.OPERATORS.fused_attention, calls))
    assert_same(outputs(model, "hf_qknorm_triton", kind), expected)
    assert len(calls) == len(patched_layers(model))


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


@pytest.mark.parametrize(("model_type", "kind"), [("llama", "plain"), ("mistral", "left"), ("qwen3", "plain")])
def test_the_compiled_model_is_the_plain_one(model_type: str, kind: str) -> None:
    model = patched(model_type, "soft_cap" if FAMILIES[model_type].own_norms else "qk_norm_cap")
    torch._dynamo.reset()
    expected = outputs(model, "hf_qknorm_triton", kind)
    got = outputs(torch.compile(model, fullgraph=True, backend="aot_eager"), "hf_qknorm_triton", kind)
    assert_same({name.removeprefix("_orig_mod."): x for name, x in got.items()}, expected)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_autocast_attends_in_bf16(model_type: str) -> None:
    model = patched(model_type, "soft_cap" if FAMILIES[model_type].own_norms else "qk_norm_cap")
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        results = [outputs(model, backend, "plain") for backend in ("hf_qknorm_triton", "hf_qknorm_eager")]
    for name, expected in results[1].items():
        assert error(results[0][name], expected) < 0.05, name


@pytest.mark.parametrize(("model_type", "cache"), [("llama", "dynamic"), ("llama", "static"), ("gpt_neox", "static")])
def test_generation_with_a_cache(model_type: str, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = patched(model_type, "qk_norm_cap")
    calls: list[Any] = []
    monkeypatch.setattr(fused.OPERATORS, "norm_rope_into", counted(fused.OPERATORS.norm_rope_into, calls))
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
