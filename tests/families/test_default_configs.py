"""Models with the default values of their config classes are patched, saved, loaded and converted.

The tiny models of other tests have windows, experts and kinds of layers of their own instead.
`pytest --all-families` runs over all types.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel

from hf_qknorm import FAMILIES, SCHEMES, convert_checkpoint, patch_model
from hf_qknorm.checkpoint import read_config
from hf_qknorm.families import known_families
from hf_qknorm.families.class_names import classes_of
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.config_checks import check_settings
from hf_qknorm.model.derived import derived_config
from qknorm_tests.default_configs import default_batch, default_config, default_model
from qknorm_tests.tables import CHANGED, OLD_TRANSFORMERS, assert_near

FEW = ("bert", "gemma2", "mistral", "qwen2_moe")
UNPATCHED = CHANGED if OLD_TRANSFORMERS else set()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "model_type" in metafunc.fixturenames:
        found = known_families() if metafunc.config.getoption("--all-families") else FEW
        metafunc.parametrize("model_type", [name for name in found if name not in UNPATCHED])


def capped(model_type: str) -> str:
    """The preset with a cap, and with norms where the type takes them."""
    refused = FAMILIES[model_type].refusal(default_config(model_type), SCHEMES["qk_norm_cap"])
    return "soft_cap" if refused else "qk_norm_cap"


def auto_class(model: PreTrainedModel) -> Any:
    """The Auto class that loads a patched model, or its own class where there is none."""
    found = classes_of(type(model).base_class.config_class.model_type)
    autos = [auto for auto, names in found.items() if type(model).base_class.__name__ in names]
    return getattr(transformers, autos[0]) if autos else type(model)


@torch.no_grad()
def out_of(model: PreTrainedModel) -> Tensor:
    result: Any = model(**default_batch(model))
    return next(result[name] for name in ("logits", "last_hidden_state") if name in result)


def test_defaults_are_saved_loaded_and_converted(model_type, tmp_path):
    scheme, base = capped(model_type), default_model(model_type)
    assert torch.equal(out_of(patch_model(copy.deepcopy(base), "none")), out_of(base))
    model = patch_model(copy.deepcopy(base), scheme)
    assert patched_layers(model)
    expected = out_of(model)
    assert torch.isfinite(expected).all()

    def check(folder: str) -> None:
        again = auto_class(model).from_pretrained(tmp_path / folder)
        assert type(again) is type(model)
        assert_near(out_of(again), expected, 1e-6)  # rounding depends on where in the file weights lie

    copy.deepcopy(model).save_pretrained(tmp_path / "saved")
    check("saved")
    base.save_pretrained(tmp_path / "base")
    convert_checkpoint(tmp_path / "base", tmp_path / "out", scheme, standalone=False)  # its code takes a second
    check("out")


def test_defaults_with_their_own_sizes_are_read(tmp_path):
    """Of every type, patched and not, without a model: many have billions of parameters."""
    for name in known_families():
        CONFIG_MAPPING[name]().save_pretrained(tmp_path / "base")
        base = read_config(tmp_path / "base")
        if FAMILIES[name].refusal(base, SCHEMES["none"]) is None:
            config = derived_config(name).from_pretrained(tmp_path / "base", qk_norm="none")
            config.save_pretrained(tmp_path / "patched")
            expected = config.to_dict() | {"_name_or_path": str(tmp_path / "patched")}
            assert read_config(tmp_path / "patched").to_dict() == expected, name


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mistral", {}),  # has no such switch
        ("qwen2_moe", {"use_sliding_window": True}),
        ("qwen2_moe", {"use_sliding_window": False, "layer_types": ["full_attention", "sliding_attention"]}),
    ],
)
def test_a_window_of_0_is_refused_where_a_layer_slides(name, settings):
    config = default_config(name)
    config.update({"use_sliding_window": False, "sliding_window": 0} | settings)
    with pytest.raises(ValueError, match="config.json: sliding_window is 0, expected a whole number ≥ 1, or null"):
        check_settings(config)
