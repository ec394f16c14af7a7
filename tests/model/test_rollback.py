"""Ctrl-C at any place of a change in memory leaves the model as it was, or as it is after the change."""

import copy
import math
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from hf_qknorm import QKClip, calibrate, patch_model, remove_norms, set_knee, unpatch_model
from hf_qknorm.model.rollback import undone_on_error
from qknorm_tests.tables import make_batch, sharp_model
from qknorm_tests.tiny_towers import tiny_towers

PLACES = 20  # of all lines that the package runs, taken evenly


def patched(scheme: str) -> Callable[[], Any]:
    return lambda: patch_model(sharp_model("llama"), scheme)


def calibrated() -> Any:
    model = patch_model(sharp_model("llama"), "qk_norm_cap")
    calibrate(model, [make_batch("llama")], knee=4.0)
    return model


def opened() -> Any:
    model = calibrated()
    set_knee(model, math.inf)
    return model


def watched() -> Any:
    model = patch_model(sharp_model("llama"), "none")
    model.clip = QKClip(model, threshold=1e-3)
    model(**make_batch("llama"))
    return model


CHANGES = {
    "patch": (lambda: sharp_model("llama"), patch_model),
    "patch by none": (lambda: sharp_model("llama"), lambda model: patch_model(model, "none")),
    "fold": (lambda: sharp_model("llama"), lambda model: patch_model(model, "qkv_norm")),
    "patch a tower": (lambda: tiny_towers("llava"), patch_model),
    "unpatch": (patched("qk_norm_cap"), unpatch_model),
    "unpatch a tower": (lambda: patch_model(tiny_towers("llava")), unpatch_model),
    "set_knee": (calibrated, lambda model: set_knee(model, 2.0)),
    "remove_norms": (opened, remove_norms),
    "clip": (watched, lambda model: model.clip.step()),
}


def state(model: Any) -> dict[str, Any]:
    """Everything that a change may change, in a form that compares."""
    found: dict[str, Any] = {name: tensor.numpy().tobytes() for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        own = {
            key: x for key, x in vars(module).items() if isinstance(x, str | bool | dict) and not key.startswith("_")
        }
        found[f"{name}."] = type(module), own, config and (type(config), config.to_dict(), str(config.name_or_path))
    return found


class Interrupt:
    """Counts the lines that the package runs, and raises KeyboardInterrupt at one of them."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.lines = at, 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if "/hf_qknorm/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                raise KeyboardInterrupt
        return self

    def run(self, change: Callable[[Any], Any], model: Any) -> int:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            change(model)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        return self.lines


@pytest.mark.parametrize("name", CHANGES)
def test_an_interrupt_leaves_no_half(name):
    make, change = CHANGES[name]
    first = make()
    unchanged, model = state(first), copy.deepcopy(first)
    change(model)  # fills the caches
    model = copy.deepcopy(first)
    lines, changed = Interrupt().run(change, model), state(model)
    assert changed != unchanged
    outcomes = []
    for place in range(1, lines + 1, max(lines // PLACES, 1)):
        model = copy.deepcopy(first)
        Interrupt(place).run(change, model)
        outcomes.append(unchanged if (found := state(model)) == unchanged else changed)
        assert found == outcomes[-1], f"line {place} of {lines}"
    assert outcomes[0] == unchanged


def test_weights_made_in_inference_mode_get_their_values_back():
    with torch.inference_mode():
        weight = torch.ones(2)

    def change() -> None:
        with undone_on_error() as keep, torch.inference_mode():
            keep(weight)
            weight.zero_()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        change()
    assert torch.equal(weight, torch.ones(2))


def test_a_refused_calibration_leaves_folded_projections():
    model = patch_model(sharp_model("gpt2"), "qkv_norm")
    before = state(model)
    with pytest.raises(ValueError, match="max_loss_increase=-9"):
        calibrate(model, [make_batch("gpt2")], max_loss_increase=-9)
    assert state(model) == before
