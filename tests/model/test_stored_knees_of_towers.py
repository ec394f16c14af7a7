"""The knees of a multimodal model's tower are stored with the whole model, and invalid ones are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_stored_knees import HARMED, NAME
from torch import Tensor
from transformers import AutoModelForImageTextToText

from hf_qknorm import Scheme, patch_model
from qknorm_tests.folders import edit
from qknorm_tests.kneed import as_older, eps_of
from qknorm_tests.tables import randomise
from qknorm_tests.tiny_towers import tiny_towers


@pytest.fixture
def llava(tmp_path: Path) -> Path:
    """A multimodal model whose text tower has knees, and whose vision tower has norms without."""
    model = patch_model(tiny_towers("llava"), Scheme(q="rms", k="rms", knee=4.0))
    patch_model(model, "qk_norm", tower="vision_tower")
    randomise(model).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("change", [lambda folder: None, as_older], ids=["now", "older"])
def test_a_tower_saves_and_loads_its_knees(change, llava):
    expected = eps_of(AutoModelForImageTextToText.from_pretrained(llava))
    change(llava)
    again = eps_of(AutoModelForImageTextToText.from_pretrained(llava, dtype=torch.float16))
    assert again == expected
    assert len(expected) == 4
    assert {eps.dtype for eps in again.values()} == {torch.float32}


@pytest.mark.parametrize("harm", HARMED)
def test_an_invalid_eps_of_a_tower_is_refused(harm, llava):
    stored = next(name for name in as_older(llava) if name.endswith("layers.1.self_attn.k_norm.eps"))
    change, message = HARMED[harm]

    def change_stored(weights: dict[str, Tensor]) -> None:
        weights[NAME] = weights.pop(stored)
        change(weights)
        if NAME in weights:
            weights[stored] = weights.pop(NAME)

    edit(llava, change_stored)
    with pytest.raises(ValueError, match=message.replace("{name}", r"[\w.]*layers\.1\.self_attn\.k_norm\.eps")):
        AutoModelForImageTextToText.from_pretrained(llava)
