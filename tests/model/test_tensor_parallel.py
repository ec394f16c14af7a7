"""Two processes that share a patched model compute the same as one, with the gradients of its norms."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_qknorm import Scheme, patch_model, unpatch_model
from qknorm_tests.pair import of_task, run_once, run_pairs
from qknorm_tests.tables import assert_identical, assert_same, make_batch, randomise, sharp_model

NORMED = {"q": "rms", "k": "layer", "v": "rms", "softcap": 5.0}
SCHEMES = {
    "shared": Scheme(**NORMED, bias=True),
    "per_head": Scheme(**NORMED, gain="per_head", bias=True),
    "scalar": Scheme(q="l2", k="l2", gain="scalar", scale=1.0),
    "knee": Scheme(**NORMED),
    "knee alone": Scheme(**NORMED, gain="none"),
    "latent": Scheme(**NORMED, gain="per_head"),
}
STYLES = {
    "shared": "replicated_with_grad_allreduce",
    "per_head": "colwise",
    "scalar": "replicated_with_grad_allreduce",
    "knee": "replicated_with_grad_allreduce",
}


def made(gain: str) -> PreTrainedModel:
    """In double precision: the gradient of one number for a whole layer is a sum of terms that cancel."""
    model_type = "minicpm3" if gain == "latent" else "llama"
    model = patch_model(sharp_model(model_type), SCHEMES[gain])
    return randomise(model, knee=4.0 if "knee" in gain else 0.0).double()


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory) -> Callable[[str], Path]:
    """The folder of a scheme's model: a checkpoint with a batch, and the results of two processes."""

    def run(root: Path) -> None:
        for gain in SCHEMES:
            made(gain).save_pretrained(root / gain)
            save_file(make_batch("plain"), root / gain / "batch.safetensors")
        run_pairs("tensor_parallel_run", root, [*SCHEMES])

    return lambda gain: of_task(run_once(tmp_path_factory, "tensor_parallel", run), gain) / gain


@pytest.mark.slow
@pytest.mark.parametrize("gain", SCHEMES)
def test_two_processes_compute_and_save_what_one_does(gain, folder_of):
    model = made(gain)
    saved = AutoModelForCausalLM.from_pretrained(folder_of(gain) / "saved").state_dict()
    assert_identical(saved, model.state_dict())
    result = model(**make_batch("plain"))
    result.loss.backward()
    parallel = load_file(folder_of(gain) / "parallel.safetensors")
    torch.testing.assert_close(parallel.pop("logits"), result.logits, atol=1e-5, rtol=1e-5)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    gains = [name for name in gradients if "_norm.weight" in name and "self_attn" in name]
    assert bool(gains) == (SCHEMES[gain].gain != "none")
    assert_same(parallel, gradients, rtol=1e-4, least=0)


@pytest.mark.parametrize("gain", STYLES)
def test_the_plan_has_entries_for_the_norms_until_unpatching(gain):
    model = sharp_model("llama")
    plans = dict(model.tp_plan), dict(model.model.tp_plan)
    patch_model(model, SCHEMES[gain])
    added = {key: style for key, style in model.tp_plan.items() if key not in plans[0]}
    assert set(added.values()) == {STYLES[gain]}
    assert {key.removeprefix("model.") for key in added} == {k for k in model.model.tp_plan if k not in plans[1]}
    last = ".weight" if SCHEMES[gain].gain == "per_head" else ""
    assert f"model.layers.*.self_attn.q_norm{last}" in added
    unpatch_model(model)
    assert (model.tp_plan, model.model.tp_plan) == plans


@pytest.mark.parametrize(("model_type", "why"), [("phi3", "gathers its heads"), ("gpt2", "has no plan")])
def test_a_model_whose_ranks_have_all_heads_needs_no_entries(model_type, why):
    model = sharp_model(model_type)
    plan = dict(model.tp_plan)
    assert dict(patch_model(model, "qk_norm").tp_plan) == plan, why
