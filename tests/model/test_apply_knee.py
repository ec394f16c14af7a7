"""`apply_knee` sets every norm of a patched model, or none if one can't have the knee."""

import math

import pytest
import torch

from hf_qknorm import Scheme, patch_model
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.knees import apply_knee, powers_of
from qknorm_tests.tables import fingerprint, make_batch, randomise, sharp_model


def patched(knee: float):  # type: ignore[no-untyped-def]
    return randomise(patch_model(sharp_model("gpt2"), Scheme(q="layer", k="layer", v="l2", knee=knee)))


@torch.no_grad()
def test_a_knee_is_applied_changed_and_removed() -> None:
    model, plain = patched(4.0), patched(0.0)
    before, powers = model.state_dict(), powers_of(model)
    assert len(powers) == 6
    apply_knee(model, 2.0, powers)
    assert all(x.data_ptr() == before[name].data_ptr() for name, x in model.state_dict().items())
    assert model.config.scheme.knee == 2.0
    assert all(layer.scheme == model.config.scheme for layer in patched_layers(model).values())
    assert powers_of(model) == pytest.approx(powers)
    apply_knee(model, 0.0, powers)
    plain.load_state_dict(model.state_dict())
    assert fingerprint(model) == fingerprint(plain)
    assert torch.equal(model(**make_batch("left")).logits, plain(**make_batch("left")).logits)
    with pytest.raises(ValueError, match="without a knee"):
        powers_of(model)
    apply_knee(model, 4.0, powers)
    assert powers_of(model) == pytest.approx(powers)


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
