"""A state dict brings the ε of its knees, or says that it can't; wrappers, reused configs and errors lose no powers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from hf_qknorm import KneeSchedule, Scheme, patch_model, set_knee
from hf_qknorm.model.knees import apply_knee, powers_of, record_loaded_knee
from qknorm_tests.kneed import SCHEMES, as_older, kneed, logits, plain
from qknorm_tests.tables import fingerprint
from qknorm_tests.tiny_towers import tiny_towers


@pytest.mark.parametrize("case", SCHEMES)
def test_a_run_goes_on_with_the_knee_of_its_checkpoint(case: str) -> None:
    """Also where keys have no gain."""
    run, resumed = kneed(case), kneed(case)
    set_knee(run, 1.0)
    resumed.load_state_dict(run.state_dict())
    record_loaded_knee(resumed, 1.0)
    assert torch.equal(logits(resumed), logits(run))
    assert powers_of(resumed) == powers_of(run)


@pytest.mark.parametrize("knee", [0.5, math.inf])
def test_the_metadata_of_a_state_dict_tell_the_knee(knee: float, tmp_path: Any) -> None:
    run, resumed = kneed("scalar"), kneed("scalar")
    apply_knee(run, 4.0, sharpness=8)
    set_knee(run, 1.0)
    set_knee(resumed, knee)
    torch.save(run.state_dict(), tmp_path / "weights.pt")
    resumed.load_state_dict(torch.load(tmp_path / "weights.pt"))
    assert resumed.config.scheme == run.config.scheme
    assert powers_of(resumed) == powers_of(run)
    assert torch.equal(logits(resumed), logits(run))
    for model in (run, resumed):
        set_knee(model, 0.0)
    assert torch.equal(logits(resumed), logits(run))


def test_a_state_without_norms_leaves_knees_alone() -> None:
    run, resumed = kneed(knee=1.0), kneed()
    apply_knee(run, 1.0, sharpness=8)
    before = resumed.config.scheme, powers_of(resumed)
    state = run.state_dict()
    for name in [name for name in state if "_norm." in name]:
        del state[name]
    resumed.load_state_dict(state, strict=False)
    assert (resumed.config.scheme, powers_of(resumed)) == before


def test_a_schedule_is_restored_in_shards(process_group: Any) -> None:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    run, resumed = (fully_shard(kneed(), mesh=mesh) for _ in range(2))
    set_knee(run, 1.0)
    set_model_state_dict(resumed, get_model_state_dict(run))
    KneeSchedule(share=1.0).restore(resumed, {"start": 4.0, "value": 1.0}, 0.5)
    assert powers_of(resumed) == powers_of(run)
    assert torch.equal(logits(resumed), logits(run))


def test_a_state_without_a_knee_does_not_fit_norms_with_one() -> None:
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: .*q_norm\.eps"):
        kneed().load_state_dict(plain().state_dict())


@pytest.mark.costly
def test_another_loader_takes_the_powers_of_the_config_alone(tmp_path: Any) -> None:
    """An older checkpoint, whose ε it does not find a use for, gives NaN instead of other numbers."""
    kneed().save_pretrained(tmp_path)
    found = []
    for _ in range(2):
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
        model.tie_weights()
        found.append(logits(load_checkpoint_and_dispatch(model, str(tmp_path), device_map={"": "cpu"}).eval()))
        as_older(tmp_path)
    torch.testing.assert_close(found[0], logits(kneed()))
    assert found[1].isnan().all()


def test_activation_checkpointing_adds_nothing_to_names_in_the_config(tmp_path: Any) -> None:
    model = kneed()
    kind = type(model.model.layers[0])
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, kind))
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(kneed()))


def test_a_tower_saves_the_knees_that_it_has_loaded(tmp_path: Any) -> None:
    """The model around it has transformers' own class."""

    def model(factor: float) -> Any:
        made = patch_model(tiny_towers("llava"), Scheme(q="rms", k="rms", knee=4.0))
        apply_knee(made, 4.0, {key: factor * (0.1 + 0.2 * i) for i, key in enumerate(powers_of(made))})
        return made.eval()

    one, other = model(1.0), model(3.0)
    other.load_state_dict(one.state_dict())
    other.save_pretrained(tmp_path)
    assert powers_of(AutoModelForImageTextToText.from_pretrained(tmp_path)) == powers_of(one)


def test_a_config_is_reused_with_another_scheme(tmp_path: Any) -> None:
    kneed().save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, qk_norm="qk_norm_cap")
    assert (config.scheme.knee, config.qk_norm_powers) == (0, None)
    config = AutoConfig.from_pretrained(tmp_path)
    config.set_scheme(dataclasses.replace(config.scheme, knee=0.0))
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).qk_norm_powers is None


@pytest.mark.parametrize(("knee", "power"), [(-1.0, 1.0), (math.nan, 1.0), (2.0, math.nan), (2.0, -1.0), (2.0, None)])
def test_a_refused_knee_changes_nothing(knee: float, power: float | None) -> None:
    model = kneed("layer")
    before, state = fingerprint(model), {name: x.clone() for name, x in model.state_dict().items()}
    *powers, last = powers_of(model)
    given = dict.fromkeys(powers, 1.0) | ({} if power is None else {last: power})
    with pytest.raises(KeyError if power is None else ValueError, match="knee|norm"):
        apply_knee(model, knee, given)
    assert fingerprint(model) == before
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())


def test_norms_without_gains_take_eps_too() -> None:
    scheme = Scheme(q="rms", k="rms", gain="none", knee=4.0)
    one, other = (patch_model(plain().base_class(plain().config.base()), scheme).eval() for _ in range(2))
    apply_knee(one, 4.0, {key: 3 * power for key, power in powers_of(one).items()})
    other.load_state_dict(one.state_dict())
    assert torch.equal(logits(other), logits(one))
