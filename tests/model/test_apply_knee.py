"""`apply_knee` sets every norm of a patched model, or none if one can't have the knee."""

import math

import pytest
import torch

from hf_qknorm import Scheme, patch_model
from hf_qknorm.model.knees import apply_knee, powers_of
from qknorm_tests.tables import fingerprint, randomise, sharp_model


def patched(knee: float):  # type: ignore[no-untyped-def]
    return randomise(patch_model(sharp_model("gpt2"), Scheme(q="layer", k="layer", v="l2", knee=knee)))


@pytest.mark.parametrize(("knee", "power"), [(-1.0, 1.0), (math.nan, 1.0), (2.0, math.nan), (2.0, -1.0), (2.0, None)])
def test_a_refused_knee_changes_nothing(knee: float, power: float | None) -> None:
    model = patched(4.0)
    before, eps = fingerprint(model), {name: x.clone() for name, x in model.state_dict().items()}
    powers = powers_of(model)
    last = list(powers)[-1]
    powers = {**powers, last: power} if power is not None else {key: x for key, x in powers.items() if key != last}
    with pytest.raises(KeyError if power is None else ValueError, match="knee|norm"):
        apply_knee(model, knee, powers)
    assert fingerprint(model) == before
    assert all(torch.equal(x, eps[name]) for name, x in model.state_dict().items())
