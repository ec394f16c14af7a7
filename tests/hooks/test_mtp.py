"""Layers of multi-token prediction, `generate(use_mtp=True)`: without the scheme, and kept by conversions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Glm4MoeForCausalLM
from transformers.modeling_layers import MtpModel
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRMSNorm

from hf_qknorm import convert_checkpoint, export_native, patch_model
from qknorm_tests.folders import edit, loaded, save
from qknorm_tests.tables import make_batch, sharp_model


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A checkpoint with such a layer behind its two. The class names another size's too, as GLM's does."""
    patterns = [rf"model\.layers\.{i}.*" for i in (1, 2)]
    monkeypatch.setattr(Glm4MoeForCausalLM, "_keys_to_ignore_on_load_unexpected", patterns)
    model = sharp_model("glm4_moe", num_mtp_layers=1)
    tensors = MtpModel(model, 1).layers[0].state_dict()
    names = {f"model.layers.2.{name.removeprefix('mtp_block.')}": torch.rand(x.shape) for name, x in tensors.items()}
    folder = save(model, tmp_path / "source")
    edit(folder, lambda weights: weights.update(names))
    return folder


def mtp_state(folder: Path) -> dict[str, Tensor]:
    return MtpModel.from_pretrained(loaded(folder)).state_dict()


@pytest.mark.parametrize("scheme", ["soft_cap", "qk_norm", "qkv_norm"])  # the last folds the norms in front
def test_layers_have_the_model_s_norms(scheme, source, tmp_path):
    patched = patch_model(loaded(source), scheme)
    convert_checkpoint(source, tmp_path / "out", scheme)
    for model in (patched, loaded(tmp_path / "out")):
        assert type(MtpModel(model, 1).layers[0].enorm) is Glm4MoeRMSNorm
        tokens, options = make_batch("plain")["input_ids"][:1], {"do_sample": False, "max_new_tokens": 8}
        assert torch.equal(model.generate(tokens, use_mtp=True, **options), model.generate(tokens, **options))


def test_conversions_and_exports_keep_them(source, tmp_path):
    data = [make_batch("plain", labels=False)]
    expected = mtp_state(source)
    convert_checkpoint(source, tmp_path / "out", "qk_norm", data=data, max_memory=60_000)
    export_native(tmp_path / "out", tmp_path / "exported", data=data)
    for folder in (tmp_path / "out", tmp_path / "exported"):
        found = mtp_state(folder)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
