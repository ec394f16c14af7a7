"""Tools that write weights refuse shared ones, and those that DeepSpeed's optimiser writes over."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from hf_qknorm import QKClip, calibrate, patch_model, remove_norms, set_knee
from qknorm_tests.covering import covering
from qknorm_tests.kneed import kneed, knees_of
from qknorm_tests.tables import fingerprint, make_batch, sharp_model

LLAMA = {"num_key_value_heads": 4, "attention_bias": True}


def opened(model: Any) -> Any:
    """A model with norms that can be folded."""
    calibrate(patch_model(model, "qk_norm"), [make_batch(kind, labels=False) for kind in ("none", "plain")], knee=4.0)
    set_knee(model, math.inf)
    return model


# By name in the message: what the tool is given, and its call.
TOOLS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "QKClip": (lambda model: patch_model(model, "none"), QKClip),
    "folding the norms": (opened, remove_norms),
    "pre_norm=False": (lambda model: model, lambda model: patch_model(model, "qkv_norm")),
}

# Two weights or biases that are one: the layer, the projection and the part of each.
TIES = [
    ("0.q_proj.weight", "0.k_proj.weight"),
    ("0.q_proj.bias", "1.q_proj.bias"),
    ("0.k_proj.weight", "1.k_proj.weight"),
    ("0.k_proj.weight", "0.v_proj.weight"),
]


@pytest.mark.parametrize(("tool", "tied", "one"), covering(TOOLS, TIES, [True, False]))
def test_shared_weights_are_refused_by_name(tool, tied, one):
    """A change would act on both places, or twice on one: of one parameter, or of two in the same memory."""
    prepare, change = TOOLS[tool]
    model = prepare(sharp_model("llama", **LLAMA))
    first, other = (name.replace(".", ".self_attn.", 1) for name in tied)
    owner, _, part = other.rpartition(".")
    parameter = model.model.layers.get_parameter(first)
    setattr(model.model.layers.get_submodule(owner), part, parameter if one else nn.Parameter(parameter.data))
    before = fingerprint(model)
    with pytest.raises(ValueError, match=rf"{re.escape(first)} and \S+{re.escape(other)} share weights: {tool}"):
        change(model)
    assert fingerprint(model) == before


@pytest.mark.parametrize(
    ("tool", "attribute"),
    [
        *((tool, attribute) for tool in ("QKClip", "folding the norms") for attribute in ("_hp_mapping", "ds_id")),
        *(("patch_model", attribute) for attribute in ("_hp_mapping", "_z3_optimizer")),
        ("pre_norm=False", "ds_id"),
    ],
)
def test_weights_that_deepspeed_copies_are_refused(tool, attribute):
    """ZeRO-1 and 2 set `_hp_mapping` on every parameter, ZeRO-3 `ds_id` at loading and `_z3_optimizer` for training."""
    prepare, change = TOOLS.get(tool, (lambda model: model, patch_model))
    model = prepare(sharp_model("llama"))
    for parameter in model.parameters():
        setattr(parameter, attribute, None)
    before = fingerprint(model)
    with pytest.raises(ValueError, match=rf"{tool}.* DeepSpeed has copies of them \(model\.embed_tokens\.weight\)"):
        change(model)
    assert fingerprint(model) == before


def test_a_calibration_under_deepspeed_is_refused():
    model = kneed()
    model.lm_head.weight.ds_id = 0
    with pytest.raises(ValueError, match="calibration needs .* and DeepSpeed has copies of them .*lm_head.weight"):
        calibrate(model, [make_batch("none", labels=False)])


def test_a_clip_that_was_made_before_deepspeed_is_refused_in_a_step():
    model = patch_model(sharp_model("llama"), "none")
    clip = QKClip(model, threshold=1e-3)
    model(**make_batch("plain"))
    for parameter in model.parameters():
        parameter._hp_mapping = None
    with pytest.raises(ValueError, match="QKClip needs the model's own weights, and DeepSpeed has copies"):
        clip.step()


def test_a_knee_moves_under_deepspeed():
    """It is a buffer, which no optimiser holds."""
    model, other = kneed(), kneed()
    for parameter in model.parameters():
        parameter._hp_mapping = None
    weights = [parameter.clone() for parameter in model.parameters()]
    for each in (model, other):
        set_knee(each, 1.0)
    assert all((a == b).all() for a, b in zip(model.parameters(), weights, strict=True))
    assert all((knee == knees_of(other)[name]).all() for name, knee in knees_of(model).items())
