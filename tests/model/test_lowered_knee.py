"""`set_knee`: lengths are kept, gains don't change, and a knee of 0 is RMSNorm's form."""

import math
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from hf_qknorm import patch_model, set_knee
from hf_qknorm.model.knees import knee_of
from qknorm_tests.covering import covering
from qknorm_tests.kneed import KNEE, SCHEMES, kneed, logits, norms, plain, wrapped
from qknorm_tests.tables import assert_near
from qknorm_tests.tiny import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")  # peft uses the old name


@pytest.mark.parametrize(("case", "knee"), covering(SCHEMES, [0.5, 20.0, math.inf], strength=1))
def test_only_the_knee_changes_and_can_be_undone(case: str, knee: float) -> None:
    model = kneed(case)
    before, powers = model.state_dict(), [norm.mean_power() for norm in norms(model)]
    before = {name: value.clone() for name, value in before.items()}
    expected = logits(model)
    set_knee(model, knee)
    assert knee_of(model) == pytest.approx(knee, rel=0.2)
    assert [norm.mean_power() for norm in norms(model)] == powers
    assert not torch.allclose(logits(model), expected, atol=1e-2)
    set_knee(model, KNEE)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(logits(model), expected)


def test_a_knee_of_zero_is_the_plain_norm_times_a_constant() -> None:
    model = kneed()
    set_knee(model, 0.0)
    assert model.config.to_dict() == plain().config.to_dict()
    norm, x = norms(model)[0], torch.randn(1, 5, 1, 16)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (16,), norm.weight, norm.eps) * norm.length())
    assert norm.shape.sharpness == 1


@pytest.mark.parametrize("knee", [0.0, 1.0])
def test_copies_of_a_norm_change_and_the_base_s_does_not(knee: float) -> None:
    adapted, merged = wrapped(kneed()), wrapped(kneed()).merge_and_unload()
    for model in (adapted, merged):
        set_knee(model, knee)
    assert_near(logits(adapted), logits(merged), 1e-5)
    with adapted.disable_adapter():
        assert torch.equal(logits(adapted), logits(kneed()))
    assert_near(logits(adapted.merge_and_unload()), logits(merged), 1e-5)


def test_norms_that_fsdp_shards(process_group: Any) -> None:
    model, expected = kneed(), kneed()
    sharded: Any = fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    for knee in (1.0, 0.0):
        set_knee(sharded, knee)
        set_knee(expected, knee)
        assert_near(logits(sharded), logits(expected), 1e-6)


def last_without_length() -> Any:
    model = kneed()
    norms(model)[-1].reset_parameters()
    return model


@pytest.mark.parametrize(
    ("make", "knee", "message"),
    [
        (lambda: tiny_model("llama"), 1.0, "LlamaForCausalLM is not patched: call patch_model"),
        (lambda: patch_model(tiny_model("llama"), "soft_cap"), 1.0, "has no norms, and so no knee"),
        (plain, 1.0, r"hold no mean length .*calibrate\(model, data, knee=4\) sets it"),
        (last_without_length, 1.0, "hold no mean length"),
        (kneed, -1.0, "knee=-1.0: expected a number ≥ 0"),
        (kneed, float("nan"), "knee=nan: expected a number ≥ 0"),
        (lambda: kneed().to("meta"), 1.0, "the norms are offloaded"),
    ],
)
def test_refusals(make: Any, knee: float, message: str) -> None:
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}, str(model), model.config.to_dict()
    with pytest.raises(ValueError, match=message):
        set_knee(model, knee)
    assert (str(model), model.config.to_dict()) == before[1:]
    for name, value in model.state_dict().items():
        assert value.is_meta or torch.equal(value, before[0][name]), name
