"""Patched models through the fused kernels, against the same models through eager."""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DynamicCache

from qknorm_tests.covering import covering
from qknorm_tests.tables import BATCHES, MODEL_TYPES, applies, sharp_model

pytest.importorskip("triton", reason="needs Triton, which comes with torch on CUDA and with the test extra")
from hf_qknorm import SCHEMES, Scheme, patch_model, set_knee
from hf_qknorm.attend.functions import REGISTERED
from hf_qknorm.families.style import CACHE
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.ops import reference
from hf_qknorm.ops.triton import attention as triton_attention
from qknorm_tests.error_budget import error
from qknorm_tests.kernel_models import DEVICE, OTHERS, assert_same, batch, counted, outputs, patched
from qknorm_tests.random_qkv import make_qkv

CASES = [
    *covering(
        MODEL_TYPES, SCHEMES, BATCHES, fits=lambda t, name, _: name != "none" and applies(t, SCHEMES[name]), strength=1
    ),
    *(("llama", scheme, "left") for scheme in ("knee", *OTHERS)),
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
    monkeypatch.setattr(triton_attention, "forward", counted(triton_attention.forward, calls))
    assert_same(outputs(model, "hf_qknorm_triton", kind), expected)
    assert len(calls) == len(patched_layers(model))


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
    holes = torch.ones(2, 1, length, length, dtype=torch.bool, device=DEVICE).tril()
    holes[:, :, 5:, 3] = False
    with pytest.raises(ValueError, match="hf_qknorm_triton.*arbitrary one.*set_attn_implementation"):
        model(tokens, attention_mask=holes, use_cache=False)
    with pytest.raises(ValueError, match=r"hf_qknorm_triton.*got torch\.float64"):
        model.double()(tokens, use_cache=False)
