"""Models with accelerate's hooks: a device map, or weights offloaded to disk."""

from pathlib import Path

import accelerate
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_qknorm import SCHEMES, patch_model, unpatch_model
from hf_qknorm.model.install import as_unpatched
from hf_qknorm.model.norms import HeadNorm
from hf_qknorm.ops.cpu import build
from qknorm_tests.covering import covering
from qknorm_tests.folders import save
from qknorm_tests.tables import applies, assert_near, fingerprint, make_batch, randomise, real, sharp_model

PRESETS = ("none", "soft_cap", "qk_norm_cap", "henry")
MODELS = covering(
    ["gemma2", "gpt2", "gpt_neox", "llama"], PRESETS, fits=lambda t, x: applies(t, SCHEMES[x]), strength=1
)


def device_map(model: PreTrainedModel) -> dict[str, str]:
    """The last layer on the disk, everything else on the CPU."""
    (layers,) = {
        name.rpartition(".")[0] for name, m in model.named_modules() if type(m).__name__ in model._no_split_modules
    }
    places = {
        name: "cpu" for name, m in model.named_modules() if not list(m.children()) and not name.startswith(layers)
    }
    return {**places, f"{layers}.0": "cpu", f"{layers}.1": "disk"}


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(sharp_model(request.param), tmp_path_factory.mktemp("checkpoint"))


def offloaded(folder: Path, tmp_path: Path, **options: str) -> PreTrainedModel:
    places = device_map(AutoModelForCausalLM.from_pretrained(folder))
    return AutoModelForCausalLM.from_pretrained(
        folder, device_map=places, offload_folder=tmp_path / "offload", **options
    )


@pytest.mark.parametrize(("checkpoint", "preset"), MODELS, indirect=["checkpoint"])
@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules:UserWarning")
@torch.no_grad()
def test_patching_a_model_with_a_layer_on_the_disk(checkpoint, preset, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_switch", lambda: "0")  # norms that accelerate hooks run in PyTorch
    batch = make_batch("left")
    whole = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")
    expected = randomise(patch_model(whole, preset))(**batch).logits
    model = offloaded(checkpoint, tmp_path, attn_implementation="eager")
    assert "meta" in {p.device.type for p in model.parameters()}
    before, plain = fingerprint(model), model(**batch).logits
    randomise(patch_model(model, preset))
    assert all(p.device.type == "cpu" for m in model.modules() if isinstance(m, HeadNorm) for p in m.parameters())
    assert torch.equal(model(**batch).logits, expected)
    with as_unpatched(model):
        assert_near(model(**batch).logits[real(batch)], plain[real(batch)], 1e-5)

    model.save_pretrained(tmp_path / "saved")
    backend = {"attn_implementation": model.config._attn_implementation}
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "saved", **backend)(**batch).logits, expected)
    assert torch.equal(offloaded(tmp_path / "saved", tmp_path, **backend)(**batch).logits, expected)

    assert torch.equal(unpatch_model(model)(**batch).logits, plain)
    assert fingerprint(model)[:-1] == before[:-1]


def by_leaf(model: PreTrainedModel, folder: Path) -> nn.Module:
    """Every second module on the disk, each with a hook of its own."""
    leaves = [name for name, module in model.named_modules() if not list(module.children())]
    places = {name: ("cpu", "disk")[i % 2] for i, name in enumerate(leaves)}
    return accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=folder, force_hooks=True)


OFFLOADS = {
    "cpu": lambda model, folder: accelerate.cpu_offload(model, execution_device="cpu"),
    "buffers": lambda model, folder: accelerate.cpu_offload(model, execution_device="cpu", offload_buffers=True),
    "disk": lambda model, folder: accelerate.disk_offload(model, folder, execution_device="cpu"),
    "leaves": by_leaf,
}


@pytest.mark.parametrize(
    ("offload", "model_type", "preset"), covering(OFFLOADS, ["llama", "gpt2"], ["soft_cap", "qk_norm_cap"])
)
@torch.no_grad()
def test_patching_a_model_whose_projections_have_hooks(offload, model_type, preset, tmp_path):
    batch = make_batch("left")
    plain = sharp_model(model_type)(**batch).logits
    expected = randomise(patch_model(sharp_model(model_type), preset))(**batch).logits
    model = OFFLOADS[offload](sharp_model(model_type), tmp_path)
    with pytest.raises(ValueError, match=r"pre_norm=False .* not in memory"):
        patch_model(model, "qkv_norm")
    patch_model(model, preset)
    assert all(p.device.type == "cpu" for m in model.modules() if isinstance(m, HeadNorm) for p in m.parameters())
    assert torch.equal(randomise(model)(**batch).logits, expected)
    assert torch.equal(unpatch_model(model)(**batch).logits, plain)


@pytest.mark.parametrize("together", ["LlamaAttention", "LlamaDecoderLayer"])
@torch.no_grad()
def test_weights_that_one_hook_loads_together(together):
    """The new norms' weights are not among them; a cap adds none."""
    expected = patch_model(sharp_model("llama"), "soft_cap")(**make_batch("left")).logits
    model = accelerate.cpu_offload(sharp_model("llama"), execution_device="cpu", preload_module_classes=[together])
    before = fingerprint(model)
    with pytest.raises(ValueError, match=r"layers\.0.*preload_module_classes.*Patch the model first"):
        patch_model(model, "qk_norm")
    assert fingerprint(model) == before
    assert torch.equal(patch_model(model, "soft_cap")(**make_batch("left")).logits, expected)
