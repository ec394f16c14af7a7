"""QuacK, QKClip and KneeSchedule in two processes (DDP, FSDP2) train as in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_qknorm import set_knee
from hf_qknorm.measure.head_weights import sizes
from hf_qknorm.training.quack import learning_rates
from qknorm_tests.pair import of_task, run_once, run_pairs
from qknorm_tests.sharded_run import FSDP1, KNEES, MODELS, RUNS, STEPS, WAYS, kneed, lower, made, rules, train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder with the weights that two processes trained."""
    return run_once(tmp_path_factory, "sharded", lambda folder: run_pairs("sharded_run", folder, [*RUNS]))


def trained(folder: Path, task: str, way: str) -> dict[str, torch.Tensor]:
    return load_file(of_task(folder, task) / f"{task}-{way}.safetensors")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model_type", MODELS)
def test_two_processes_train_as_one_does(model_type, way, folder):
    model = made(model_type)
    optimizer, clip = rules(model)
    clipped: list[Any] = []
    train(model, optimizer, clip, range(STEPS), slice(None), clipped.append)
    assert sum(bool(found) for found in clipped) > 1
    now = {layer: learning_rates(sizes(parts)) for layer, parts in optimizer.layers.items()}
    assert max(float((now[layer][name] / x - 1).abs().max()) for (layer, name), x in optimizer.first.items()) > 0.1
    found = trained(folder, model_type, way)
    for name, p in model.state_dict().items():
        torch.testing.assert_close(found[name], p, rtol=1e-6, atol=1e-6, msg=name)  # logits are shared in fp32


@pytest.mark.parametrize("way", KNEES)
def test_a_knee_falls_in_two_processes_as_in_one(way, folder):
    model = kneed()
    lower(model, slice(None))
    found = trained(folder, "knee", way)
    assert found.keys() == model.state_dict().keys()
    for name, p in model.state_dict().items():
        torch.testing.assert_close(found[name], p, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("way", FSDP1)
def test_set_knee_changes_the_shards_of_fsdp_1(way, folder):
    model = kneed()
    set_knee(model, 1.0)
    found = trained(folder, "fsdp1", way)
    for name, p in model.state_dict().items():
        assert torch.equal(found[name], p), name
