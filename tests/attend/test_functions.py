"""The attention functions: every backend computes the same, keeps causality, and none drops a cap."""

import os
import shutil
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from hf_qknorm import FAMILIES, SCHEMES, Scheme, patch_model
from hf_qknorm.attend.calls import UNSUPPORTED
from hf_qknorm.attend.functions import REGISTERED
from hf_qknorm.families.style import CACHE
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.ops import reference
from hf_qknorm.ops.cpu import build
from qknorm_tests.covering import covering
from qknorm_tests.error_budget import error
from qknorm_tests.tables import (
    BATCHES,
    LENGTH,
    MODEL_TYPES,
    applies,
    assert_near,
    causal_families,
    make_batch,
    randomise,
    real,
    sharp_model,
)

HERE = build._why_impossible() is None and os.environ.get("HF_QKNORM_CPU") != "0"
ABSENT = ("hf_qknorm_triton",) if HERE else ("hf_qknorm_triton", "hf_qknorm_cpu")
OWN = tuple(name for name in REGISTERED if name not in ABSENT)  # test_kernels_in_models.py has the one in Triton
CAPPING = (*OWN, "eager")
TOLERANCE = 1e-5
# The published caps of 50 change almost nothing on tiny models; these do.
CAPPED = {name: replace(SCHEMES[name], softcap=2.0) for name in ("soft_cap", "qk_norm_cap")}
MODELS = covering(MODEL_TYPES, CAPPED, fits=lambda t, name: applies(t, CAPPED[name]), strength=1)

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="flex_attention on the CPU needs a C++ compiler, and AVX2",
)


def capped_model(model_type: str, scheme: str, **settings: Any) -> PreTrainedModel:
    return randomise(patch_model(sharp_model(model_type, **settings), CAPPED[scheme]))


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return capped_model(*request.param)


def outcome(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The logits of all tokens but padding, and every gradient."""
    model.zero_grad()
    result = model(**batch)
    result.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {"logits": result.logits[real(batch)].detach(), **grads}


def assert_agree(found: dict[str, dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for backend, results in found.items():
        for name, value in results.items():
            # A bias that cancels in the softmax has a gradient of rounding errors alone.
            if expected[name].abs().max() > 1e-6:
                assert_near(value, expected[name], TOLERANCE, f"{backend}: {name}")


def outcomes(model: PreTrainedModel, batch: dict[str, Tensor], backends: tuple[str, ...]) -> dict[str, Any]:
    found = {}
    for backend in backends:
        model.set_attn_implementation(backend)
        found[backend] = outcome(model, batch)
    return found


@pytest.mark.parametrize(
    ("model", "kind"),
    [*covering(MODELS, BATCHES, strength=1), *((("llama", "qk_norm_cap"), kind) for kind in BATCHES)],
    indirect=["model"],
    ids=str,
)
def test_backends_with_a_cap_agree(model, kind):
    found = outcomes(model, make_batch(kind), ("hf_qknorm_eager", *CAPPING))
    assert_agree(found, found["hf_qknorm_eager"])


@pytest.mark.parametrize(("model_type", "kind"), covering(MODEL_TYPES, BATCHES, strength=1))
def test_backends_without_a_cap_agree(model_type, kind):
    own_norms, own_cap = FAMILIES[model_type].own_norms, FAMILIES[model_type].own_cap
    settings = {"attn_logit_softcapping": None} if own_cap else {}
    model = randomise(patch_model(sharp_model(model_type, **settings), "none" if own_norms else "qk_norm"))
    found = outcomes(model, make_batch(kind), (*CAPPING, *(() if own_cap else ("sdpa",))))
    assert_agree(found, found["hf_qknorm_eager"])


@pytest.mark.parametrize(("model_type", "kind"), covering(["llama", "mistral", "gpt2", "qwen3"], BATCHES, strength=1))
def test_models_without_a_patch_run_on_it(model_type, kind):
    """Under autocast their RoPE gives queries and keys in fp32, beside values in bf16."""
    model, batch, backends = sharp_model(model_type), make_batch(kind), ("sdpa", "hf_qknorm", "hf_qknorm_tiled")
    found = outcomes(model, batch, backends)
    assert_agree(found, found["sdpa"])
    with torch.autocast("cpu", torch.bfloat16):
        rounded = outcomes(model, batch, backends)
    for backend, results in rounded.items():
        assert_near(results["logits"], found["sdpa"]["logits"], 0.05, backend)
        assert all(x.isfinite().all() for x in results.values())


@torch.no_grad()
def test_packed_rows_are_separate_sequences(model):
    """By positions that restart; or by `cu_seq_lens_q`, as from the flattening collator, also for models whose
    positions do not show the packing.
    """
    batch = make_batch("packed", labels=False)
    starts = (batch["position_ids"].flatten() == 0).nonzero().flatten()
    ends = torch.cat([starts, torch.tensor([2 * LENGTH])]).to(torch.int32)
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 13, "max_length_k": 13}
    tokens = batch["input_ids"].flatten()
    alone = [model(input_ids=tokens[start:stop][None]).logits[0] for start, stop in pairwise(ends.tolist())]
    expected = torch.cat(alone).view(2, LENGTH, -1)
    for backend in CAPPING:
        model.set_attn_implementation(backend)
        assert_near(model(**batch).logits, expected, TOLERANCE, backend)
        for use_cache in (False, True):
            actual = model(**{**batch, "use_cache": use_cache}, **lengths).logits
            assert_near(actual, expected, TOLERANCE, f"{backend}, cache {use_cache}")
    first, rest = batch["input_ids"].split([8, LENGTH - 8], dim=1)
    cache = model(input_ids=first, use_cache=True)[CACHE]
    with pytest.raises(ValueError, match="cu_seq_lens_q"):
        model(input_ids=rest, **{CACHE: cache}, **lengths)


@pytest.mark.slow
@needs_compiler
@pytest.mark.filterwarnings("ignore:.*(_compile flag|script_method):DeprecationWarning")  # torch's
@pytest.mark.parametrize(("model_type", "cap"), [("llama", None), ("mistral", 2.0)])
@torch.no_grad()
def test_flex_attention_agrees(model_type, cap):
    model = randomise(patch_model(sharp_model(model_type), Scheme(q="auto", k="auto", softcap=cap)))
    batch = make_batch("left")
    expected = model(**batch).logits[real(batch)]
    model.set_attn_implementation("flex_attention")
    assert_near(model(**batch).logits[real(batch)], expected, TOLERANCE)


@pytest.mark.parametrize(("model_type", "backend"), covering(MODEL_TYPES, CAPPING, strength=1))
@torch.no_grad()
def test_a_full_pass_in_pieces(model_type, backend):
    """A prompt in two chunks and then single tokens, into a cache that keeps all keys: windows are masked."""
    model = capped_model(model_type, "soft_cap")
    model.set_attn_implementation(backend)
    tokens = make_batch("plain")["input_ids"]
    cache = DynamicCache()
    pieces = [model(input_ids=piece, **{CACHE: cache}).logits for piece in tokens.split([6, 7, 1, 1, 1, 4], dim=1)]
    assert_near(torch.cat(pieces, dim=1), model(input_ids=tokens).logits, TOLERANCE)


@pytest.mark.parametrize("backend", [name for name in CAPPING if name != "hf_qknorm_cpu"])
@torch.no_grad()
def test_a_mask_of_the_users_own(backend):
    """A 4D mask of two packed sequences, boolean or additive, gives the results of positions that restart."""
    model = capped_model("llama", "qk_norm_cap")
    model.set_attn_implementation(backend)
    packed = make_batch("packed", labels=False)
    row = (packed["position_ids"] == 0).cumsum(1)
    seen = (row[:, :, None] == row[:, None, :]).tril()[:, None]
    additive = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    expected = model(**packed).logits
    for mask in (additive,) if backend == "eager" else (additive, seen):
        assert_near(model(**packed, attention_mask=mask).logits, expected, TOLERANCE)


def test_a_model_without_causality_is_bidirectional():
    """Text embedders set `config.is_causal = False` or the module's flag."""
    batch = make_batch("left", labels=False)
    expected = None
    for backend in CAPPING:
        model = capped_model("llama", "qk_norm_cap")
        model.config.is_causal = False
        for layer in model.model.layers:
            layer.self_attn.is_causal = False
        model.set_attn_implementation(backend)
        logits = model(**batch).logits[real(batch)]
        expected = logits if expected is None else expected
        assert_near(logits, expected, TOLERANCE, backend)
    causal = capped_model("llama", "qk_norm_cap")(**batch).logits[real(batch)]
    assert error(causal.detach(), expected.detach()) > 0.01


@pytest.mark.parametrize("backend", OWN)
def test_arguments_that_do_not_fit_are_refused(backend):
    """Ranges are integers, too, in another shape than a mask's."""
    heads, function = torch.zeros(1, 2, 3, 16), REGISTERED[backend]
    for keys in (3, 9):
        k = torch.zeros(1, 2, keys, 16)
        with pytest.raises(ValueError, match=r"the mask must be boolean .* got torch.int32"):
            function(nn.Module(), heads, k, k, torch.ones(1, 1, 3, keys, dtype=torch.int32))
    for name in UNSUPPORTED:
        with pytest.raises(ValueError, match=f"does not support the argument '{name}'"):
            function(nn.Module(), heads, heads, heads, None, **{name: torch.zeros(1)})
    for others in (dict.fromkeys(UNSUPPORTED, 1), dict.fromkeys(reversed(UNSUPPORTED), 1)):
        with pytest.raises(ValueError, match=f"argument '{next(iter(UNSUPPORTED))}'"):
            function(nn.Module(), heads, heads, heads, None, **others)


@pytest.mark.parametrize("backend", OWN)
def test_without_a_mask_the_modules_causality_counts(backend):
    """Of a static cache's first call the rest of the keys is empty. A single query sees them all."""
    q, k, v = (torch.randn(1, 2, n, 16, generator=torch.Generator().manual_seed(0)) for n in (5, 9, 9))
    module = nn.Module()
    for queries, causal, seen in ((5, True, 5), (5, False, 9), (1, True, 9)):
        module.is_causal = causal
        expected = reference.attention(q[:, :, :queries], k[:, :, :seen], v[:, :, :seen], causal=causal).out
        got, _ = REGISTERED[backend](module, q[:, :, :queries], k, v, None)
        assert_near(got, expected.transpose(1, 2), TOLERANCE)


def test_the_cap_of_a_model_that_runs_its_own_forward_is_the_layers():
    """Its forward passes none."""
    model, batch, found = sharp_model("qwen3"), make_batch("plain", labels=False), []
    for cap in (None, 2.0, 1e4):
        patched = model if cap is None else patch_model(deepcopy(model), Scheme(softcap=cap))
        with torch.no_grad():
            found.append(patched(**batch).logits)
    assert_near(found[2], found[0], TOLERANCE)
    assert error(found[1], found[0]) > 0.01


UNPATCHED = [x for x in ("bigbird_pegasus", "doge", "mistral") if x in causal_families()]


@torch.no_grad()
@pytest.mark.parametrize("model_type", UNPATCHED)
def test_a_model_that_is_not_patched(model_type):
    """The layers of one say that they are not causal, and one computes with its masks."""
    model, batch = sharp_model(model_type), make_batch("plain", labels=False)
    found = []
    for backend in ("eager", "hf_qknorm"):
        model.set_attn_implementation(backend)
        tokens = model.generate(
            **batch, max_new_tokens=2, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        found.append(torch.cat([model(**batch).logits, torch.stack(tokens.logits, 1)], 1))
    assert_near(found[1], found[0], TOLERANCE)


BIASED_MASKS = ("causal", "window", "both sides", "boolean", "additive", "ranges")


@pytest.mark.parametrize(
    ("mask", "name", "shape"),
    covering(BIASED_MASKS, ["hf_qknorm", "hf_qknorm_eager"], [(2, 4, 1, 9), (1, 1, 9, 9)]),
    ids=str,
)
def test_a_position_bias_is_added_to_the_capped_logits(name, mask, shape):
    """In every form of mask, over the keys that it shows; a key that it hides stays hidden. Kernels refuse it."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, 16, generator=generator) for n in (9, 9, 9))
    bias = position = 3 * torch.randn(shape, generator=generator)
    back = torch.arange(9)[:, None] - torch.arange(9)
    seen = {"window": (back >= 0) & (back < 3), "both sides": back > -9}.get(mask, back >= 0).expand(2, 1, 9, 9).clone()
    options: dict[str, Any] = {"is_causal": mask != "both sides", "sliding_window": 3 if mask == "window" else None}
    given = None
    if mask in ("boolean", "additive", "ranges"):
        seen[0, ..., :2] = False
        own = torch.randn(2, 1, 9, 9, generator=generator)  # a mask's own numbers count, too
        given = seen if mask == "boolean" else own.where(seen, torch.finfo(q.dtype).min)
        bias = bias + own if mask == "additive" else bias
    if mask == "ranges":
        start, count = seen.int().argmax(-1), seen.sum(-1)
        given = torch.stack([start, start + count], -1).to(torch.int32)
    module = next(iter(patched_layers(capped_model("llama", "soft_cap")).values()))
    out, _ = REGISTERED[name](module, q, k, v, given, scaling=1.0, softcap=2.0, position_bias=position, **options)
    logits = 2 * torch.tanh(q @ k.transpose(-1, -2) / 2) + bias
    expected = logits.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num() @ v
    assert_near(out, expected.transpose(1, 2), 1e-5)
    with pytest.raises(ValueError, match="position bias"):
        REGISTERED["hf_qknorm_triton"](module, q, k, v, None, position_bias=position)
