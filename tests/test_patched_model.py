"""A patched model can be copied, pickled, cast and moved, and computes as unpatched within `as_unpatched`."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_qknorm import FAMILIES, Scheme, patch_model, unpatch_model
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.install import as_unpatched
from hf_qknorm.model.norms import HeadNorm
from qknorm_tests.children import child
from qknorm_tests.tables import (
    KNEES,
    MODEL_TYPES,
    PAIRS,
    TRIED,
    assert_near,
    fingerprint,
    make_batch,
    randomise,
    sharp_model,
)
from qknorm_tests.tiny import TINY

every_model = pytest.mark.parametrize(("model_type", "preset"), [*PAIRS, *KNEES])


@every_model
@torch.no_grad()
def test_as_unpatched_is_the_base_model(model_type, preset):
    scheme, base = TRIED[preset], sharp_model(model_type)
    model = randomise(patch_model(sharp_model(model_type), scheme))
    base.set_attn_implementation(model.config._attn_implementation)
    batch = make_batch("left")
    patched, expected = model(**batch).logits, base(**batch).logits
    before = fingerprint(model)
    with as_unpatched(model):
        assert_near(model(**batch).logits, expected, 0 if scheme.pre_norm else 2e-5)  # a fold rounds
    assert fingerprint(model) == before
    assert torch.equal(model(**batch).logits, patched)
    with pytest.raises(KeyError), as_unpatched(model):
        raise KeyError
    assert fingerprint(model) == before
    assert torch.equal(model(**batch).logits, patched)
    own_cap = getattr(base.config, "attn_logit_softcapping", None)
    unchanged = scheme in (Scheme(), Scheme(softcap=own_cap))
    assert torch.equal(patched, expected) == unchanged


@every_model
@torch.no_grad()
def test_deepcopy_and_pickle(model_type, preset):
    model = randomise(patch_model(sharp_model(model_type), TRIED[preset]))
    expected = model(**make_batch("left")).logits
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(copied) is type(model)
        assert str(copied) == str(model)
        assert torch.equal(copied(**make_batch("left")).logits, expected)
    if TRIED[preset].pre_norm:
        unpatch_model(copied)
        assert not patched_layers(copied)
    assert len(patched_layers(model)) == 2


@pytest.mark.slow
def test_a_pickle_loads_in_a_new_process(tmp_path):
    models = [randomise(patch_model(sharp_model(model_type), "soft_cap")) for model_type in ("gpt2", "llama")]
    batch = make_batch("left", labels=False)
    with torch.no_grad():
        logits = [model(**batch).logits for model in models]
    (tmp_path / "models.pickle").write_bytes(pickle.dumps((models, batch, logits)))
    script = (
        "import pickle, sys, torch; torch.set_num_threads(1)\n"
        "models, batch, logits = pickle.load(open(sys.argv[1], 'rb'))\n"
        "sys.exit(not all(torch.equal(m(**batch).logits, x) for m, x in zip(models, logits, strict=True)))"
    )
    child(script, tmp_path / "models.pickle", home=tmp_path)


@pytest.mark.parametrize("model_type", [t for t in MODEL_TYPES if not FAMILIES[t].own_norms])
@torch.no_grad()
def test_new_parameters_take_the_models_dtype(model_type):
    scheme = Scheme(q="rms", k="rms", gain="per_head", bias=True)
    model = patch_model(sharp_model(model_type).to(torch.bfloat16), scheme)
    added = [p for module in model.modules() if isinstance(module, HeadNorm) for p in module.parameters()]
    assert len(added) == 8
    assert all(p.dtype == torch.bfloat16 for p in added)
    assert model(**make_batch("left")).logits.dtype == torch.bfloat16


@torch.no_grad()
def test_a_removed_norm_follows_the_model_to_another_dtype():
    model, base = randomise(patch_model(sharp_model("llama"), "qkv_norm")), sharp_model("llama")
    model.to(torch.bfloat16)
    with as_unpatched(model):
        logits = model(**make_batch("left")).logits
    assert logits.dtype == torch.bfloat16
    assert_near(logits, base(**make_batch("left")).logits, 0.05)


@pytest.mark.parametrize("preset", ["qk_norm_cap", "knee"])
@torch.no_grad()
def test_a_model_on_the_meta_device(preset):
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**TINY)).eval()
    patch_model(model, TRIED[preset])
    assert {p.device.type for p in model.parameters()} == {"meta"}  # a knee's ε is no parameter, and stays
    source = randomise(patch_model(sharp_model("llama"), TRIED[preset]))
    model.load_state_dict(source.state_dict(), assign=True)
    model.model.rotary_emb = source.model.rotary_emb  # its buffers are in no state dict
    assert torch.equal(model(**make_batch("left")).logits, source(**make_batch("left")).logits)


@every_model
def test_under_autocast_q_and_k_reach_the_attention_in_the_dtype_of_v(model_type, preset):
    model = randomise(patch_model(sharp_model(model_type), TRIED[preset]))
    seen = []
    for layer in patched_layers(model).values():
        layer.observers = (lambda module, q, k, v, *rest: seen.append((q.dtype, k.dtype, v.dtype)),)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**make_batch("left")).loss
    loss.backward()
    if not FAMILIES[model_type].own_norms:  # whose own forward may promote them: the attention function casts
        assert seen == [(torch.bfloat16,) * 3] * 2
    assert all(p.grad.isfinite().all() for p in model.parameters())
