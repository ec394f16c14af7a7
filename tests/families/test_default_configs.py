"""The default values of config classes, which tiny models replace: they are read, and a window of 0 is refused."""

from __future__ import annotations

import pytest
from transformers import CONFIG_MAPPING

from hf_qknorm import FAMILIES, SCHEMES
from hf_qknorm.checkpoint import read_config
from hf_qknorm.families import known_families
from hf_qknorm.model.config_checks import check_settings
from hf_qknorm.model.derived import derived_config


def test_defaults_of_every_type_are_read(tmp_path):
    """Patched and not, without a model: many have billions of parameters."""
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
    config = CONFIG_MAPPING[name](num_hidden_layers=2)
    check_settings(CONFIG_MAPPING["qwen2_moe"](use_sliding_window=False, sliding_window=0))
    config.update({"use_sliding_window": False, "sliding_window": 0} | settings)
    with pytest.raises(ValueError, match="config.json: sliding_window is 0, expected a whole number ≥ 1, or null"):
        check_settings(config)
