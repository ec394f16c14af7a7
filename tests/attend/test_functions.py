"""The attention functions: every backend computes the same, keeps causality, and none drops a cap."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_qknorm import FAMILIES, SCHEMES, Scheme, patch_model
from hf_qknorm.attend.calls import UNSUPPORTED
from hf_qknorm.attend.functions import REGISTERED
from hf_qknorm.families.style import CACHE
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


@pytest.mark.parametrize(
    ("model", "kind"),
    [*covering(MODELS, BATCHES, strength=1), *((("llama", "qk_norm_cap"), kind) for kind in BATCHES)],
    indirect=["model"],
    ids=str,
)
def test_backends_with_a_cap_agree(model, kind):
    batch = make_batch(kind)
    model.set_attn_implementation("hf_qknorm_eager")
    expected = outcome(model, batch)
    for backend in CAPPING:
        model.set_attn_implementation(backend)
        for name, value in outcome(model, batch).items():
            # A bias that cancels in the softmax has a gradient of rounding errors alone.
            if expected[name].abs().max() > 1e-6:
                assert_near(value, expected[name], TOLERANCE, f"{backend}: {name}")


@pytest.mark.parametrize(("model_type", "kind"), covering(MODEL_TYPES, BATCHES, strength=1))
@torch.no_grad()
def test_backends_without_a_cap_agree(model_type, kind):
    scheme = SCHEMES["none"] if FAMILIES[model_type].own_norms else SCHEMES["qk_norm"]
    settings = {"attn_logit_softcapping": None} if FAMILIES[model_type].own_cap else {}
    model = randomise(patch_model(sharp_model(model_type, **settings), scheme))
    batch = make_batch(kind)
    logits = {}
    for backend in (*CAPPING, *(() if FAMILIES[model_type].own_cap else ("sdpa",))):
        model.set_attn_implementation(backend)
        logits[backend] = model(**batch).logits[real(batch)]
        assert_near(logits[backend], logits["hf_qknorm"], TOLERANCE, backend)


@pytest.mark.parametrize(("model_type", "kind"), covering(["llama", "mistral", "gpt2", "qwen3"], BATCHES, strength=1))
def test_models_without_a_patch_run_on_it(model_type, kind):
    """Under autocast their RoPE gives queries and keys in fp32, beside values in bf16."""
    model, batch, found = sharp_model(model_type), make_batch(kind), {}
    for backend in ("sdpa", "hf_qknorm", "hf_qknorm_tiled"):
        model.set_attn_implementation(backend)
        found[backend] = outcome(model, batch)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = outcome(model, batch)
        assert_near(rounded["logits"], found["sdpa"]["logits"], 0.05, backend)
        assert all(x.isfinite().all() for x in rounded.values())
    for name, value in found["sdpa"].items():
        for backend in ("hf_qknorm", "hf_qknorm_tiled"):
            if value.abs().max() > 1e-6:
                assert_near(found[backend][name], value, TOLERANCE, name)


@torch.no_grad()
def test_packed_rows_are_separate_sequences(model):
    batch = make_batch("packed", labels=False)
    starts = (batch["position_ids"][1] == 0).nonzero().flatten().tolist()
    alone = [
        model(input_ids=batch["input_ids"][1:, start:stop]).logits
        for start, stop in zip(starts, [*starts[1:], LENGTH], strict=True)
    ]
    for backend in CAPPING:
        model.set_attn_implementation(backend)
        assert_near(model(**batch).logits[1:], torch.cat(alone, dim=1), TOLERANCE, backend)


@torch.no_grad()
def test_packed_rows_by_their_lengths(model):
    """`cu_seq_lens_q`, as from the flattening collator, also for models whose positions do not show the packing."""
    batch = make_batch("packed", labels=False)
    starts = (batch["position_ids"].flatten() == 0).nonzero().flatten()
    ends = torch.cat([starts, torch.tensor([2 * LENGTH])]).to(torch.int32)
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 13, "max_length_k": 13}
    for backend in CAPPING:
        model.set_attn_implementation(backend)
        expected = model(**batch).logits
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


@torch.no_grad()
@pytest.mark.parametrize(("backend", "shape"), covering(OWN, [(12, 12), (1, 12), (3, 12)], strength=1), ids=str)
def test_a_mask_of_integers_is_refused(backend, shape):
    """Ranges are integers too, in another shape."""
    model = capped_model("llama", "soft_cap")
    model.set_attn_implementation(backend)
    queries, keys = shape
    tokens, cache = torch.randint(64, (2, keys)), DynamicCache()
    if queries < keys:
        model(tokens[:, :-queries], past_key_values=cache)
    mask = torch.ones(2, 1, queries, keys, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"the mask must be boolean .* got torch.int32"):
        model(torch.randint(64, (2, queries)), past_key_values=cache, attention_mask=mask)


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


@pytest.mark.parametrize(("backend", "name"), covering(OWN, UNSUPPORTED, strength=1))
def test_arguments_that_would_be_dropped_are_refused(backend, name):
    heads = torch.zeros(1, 2, 3, 16)
    with pytest.raises(ValueError, match=f"does not support the argument '{name}'"):
        REGISTERED[backend](torch.nn.Module(), heads, heads, heads, None, **{name: torch.zeros(1)})
