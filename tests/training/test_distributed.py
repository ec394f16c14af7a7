"""Training in two processes (DDP, FSDP2) equals that in one."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

from hf_qknorm import QKClip, patch_model
from qknorm_tests import distributed_run as job
from qknorm_tests.kneed import knees_of, logits, set_shapes
from qknorm_tests.pair import run_in_turn
from qknorm_tests.tables import assert_identical, assert_same, make_batch, sharp_model

CONFIGS = Path(__file__).parents[2] / "recipes" / "accelerate"

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")  # peft uses the old name


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Callable[[str], Path]:
    """The folder with the results of a task in two processes."""
    return run_in_turn(tmp_path_factory, "distributed_run", (), [*job.TASKS])


@pytest.mark.slow
@pytest.mark.parametrize("way", job.WAYS)
@pytest.mark.parametrize("case", job.CASES)
def test_two_processes_give_the_loss_and_the_gradients_of_one(case, way, ran):
    model = job.made(case)
    loss = model(**make_batch("plain")).loss
    loss.backward()
    expected = job.gradients(model)
    assert any(name.endswith("sinks") for name in expected) == (case == "sinks")
    assert sum("q_norm" in name for name in expected) == (2 if case == "scalar" else 4)
    found = load_file(ran(case) / f"{case} {way}.safetensors")
    torch.testing.assert_close(found.pop("loss"), loss.detach(), rtol=1e-6, atol=0)
    assert_same(found, expected, rtol=1e-4, least=0)


@pytest.mark.slow
def test_adapters_and_their_norms_train_in_two_processes_as_in_one(ran):
    model = job.adapted()
    model(**make_batch("plain")).loss.backward()
    assert_same(load_file(ran("adapter") / "adapter.safetensors"), job.gradients(model), rtol=1e-4, least=0)


@pytest.mark.slow
@pytest.mark.parametrize("case", job.CASES)
def test_a_sharded_model_saves_a_whole_checkpoint_in_several_files(case, ran):
    folder = ran(case) / f"{case} FSDP2"
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    expected = job.made(case)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert type(loaded) is type(expected)
    assert json.loads((folder / "config.json").read_text())["architectures"] == [type(expected).__name__]
    assert_identical(loaded.state_dict(), expected.state_dict())


def test_sharding_and_mixed_precision_leave_knees_alone(process_group):
    """Also of a model that loads a sharded state dict."""
    model = job.made("shared")
    expected = knees_of(model)
    mesh = init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    model(**make_batch("plain")).loss.backward()
    state = get_model_state_dict(model)
    again = fully_shard(job.made("shared"), mesh=mesh, mp_policy=policy)
    set_shapes(again, 1.0)
    set_model_state_dict(again, state)
    assert len(expected) == 6
    for sharded in (model, again):
        assert all(torch.equal(knee, expected[name]) for name, knee in knees_of(sharded).items())


@pytest.mark.slow
def test_a_model_of_the_meta_device_takes_the_knees_that_rank_0_sends(ran):
    found = load_file(ran("sent") / "sent.safetensors")
    assert_identical(found, knees_of(job.made("shared")))


def test_a_clip_changes_the_shards(process_group):
    expected, model = (patch_model(sharp_model("llama"), "none") for _ in range(2))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    for each in (expected, model):
        clip = QKClip(each, threshold=1.0)
        each(**make_batch("plain"))
        assert clip.step()
    model.reshard()
    assert torch.equal(logits(model), logits(expected))


def test_a_clip_refuses_fsdp_1_before_a_step(process_group):
    model = patch_model(sharp_model("llama"), "none")
    clip = QKClip(model, threshold=1.0)
    wrapped = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match="can't be changed between steps under FSDP 1: shard by FSDP2"):
        clip.on_train_begin(None, None, None, model=wrapped)


@pytest.mark.slow
@pytest.mark.parametrize("way", job.RULED_WAYS)
@pytest.mark.parametrize("model_type", job.RULED)
def test_quack_and_clips_train_in_two_processes_as_in_one(model_type, way, ran):
    model = job.ruled(model_type)
    assert job.train(model, job.rules(model), range(job.STEPS), slice(None)) > 1
    found = load_file(ran(model_type) / f"{model_type}, {way}.safetensors")
    torch.testing.assert_close(found, dict(model.state_dict()), rtol=1e-6, atol=1e-6)  # logits are shared in fp32


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_accelerate_launch_accepts_the_configs(name):
    command = ["--config_file", str(CONFIGS / f"{name}.yaml"), "train.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(command))
    chosen = {"ddp": arguments.multi_gpu, "fsdp2": arguments.use_fsdp}.get(name, arguments.use_deepspeed)
    assert chosen
    if arguments.use_deepspeed:
        config = HfDeepSpeedConfig(str(CONFIGS.parents[1] / arguments.deepspeed_config_file))
        assert {"zero2": config.is_zero2, "zero3": config.is_zero3}[name]()
        assert arguments.zero3_init_flag is (name == "zero3")
