"""The text models of Qwen2-VL and Qwen2.5-VL, by themselves: positions of three axes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModel, PreTrainedModel

from hf_qknorm import patch_model, unpatch_model
from hf_qknorm.model.attention import patched_layers
from qknorm_tests.tables import randomise
from qknorm_tests.tiny import TINY

ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
VISION = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
VISION |= {"out_hidden_size": 64, "intermediate_size": 64, "fullatt_block_indexes": [0]}
CLASSES = {"qwen2_vl_text": "Qwen2VL", "qwen2_5_vl_text": "Qwen2_5_VL"}


def made(model_type: str, whole: bool = False) -> PreTrainedModel:
    torch.manual_seed(0)
    settings = TINY | {"initializer_range": 0.3, "rope_parameters": ROPE, "use_sliding_window": False}
    if not whole:
        return (
            getattr(transformers, f"{CLASSES[model_type]}TextModel")
            ._from_config(getattr(transformers, f"{CLASSES[model_type]}TextConfig")(**settings))
            .eval()
        )
    config = getattr(transformers, f"{CLASSES[model_type]}Config")(text_config=settings, vision_config=VISION)
    return getattr(transformers, f"{CLASSES[model_type]}ForConditionalGeneration")._from_config(config).eval()


def batch() -> dict[str, Any]:
    """Tokens whose three positions differ, as those of an image do; the first row is padded at the left."""
    generator = torch.Generator().manual_seed(0)
    positions = torch.arange(20).expand(3, 2, 20) // torch.tensor([1, 2, 4])[:, None, None]
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[0, :6] = 0
    tokens = torch.randint(3, 64, (2, 20), generator=generator)
    return {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    model(**batch()).last_hidden_state.square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("model_type", CLASSES)
def test_the_shared_forward_has_the_bits_of_the_models_own(model_type):
    own, ours = made(model_type), patch_model(made(model_type), "none")
    for layer in patched_layers(ours).values():
        layer.observers = (lambda *_: None,)  # else the model's own forward runs
    expected, found = gradients(own), gradients(ours)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("model_type", CLASSES)
@torch.no_grad()
def test_norms_are_stored_and_removed(model_type, tmp_path):
    model = made(model_type)
    before = model(**batch()).last_hidden_state
    randomise(patch_model(model, "qk_norm_cap"))
    after = model(**batch()).last_hidden_state
    model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(again(**batch()).last_hidden_state, after)
    assert not torch.allclose(after, before)
    assert torch.equal(unpatch_model(model)(**batch()).last_hidden_state, before)


@pytest.mark.parametrize("model_type", CLASSES)
def test_the_tower_of_a_whole_model_is_refused(model_type):
    """Its config builds the text config from transformers' own class."""
    model = made(model_type, whole=True)
    with pytest.raises(ValueError, match=r"from a fixed class .* patch_model\(model\.model\.language_model"):
        patch_model(model, "qk_norm")
    assert not patched_layers(model)
