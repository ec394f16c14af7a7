"""Ways to move a model's state that are not ours: each brings the norms' knees along, to the bit."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator, init_empty_weights, load_checkpoint_and_dispatch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from qknorm_tests.covering import covering
from qknorm_tests.kneed import kneed, knees_of, logits, plain, wrapped
from qknorm_tests.short_runs import SaveAt, trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # peft uses the old name
    pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed"),
]

CASE = "lp"  # its gains are per head, its order 3, and its sharpness 4
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def source() -> PreTrainedModel:
    return kneed(CASE)


def other() -> PreTrainedModel:
    """Of the same scheme and another calibration."""
    return kneed(CASE, knee=0.5, power=3.0)


def fresh() -> PreTrainedModel:
    return plain(CASE)


def assert_moved(model: Any, expected: Any) -> None:
    """The models compute the same bits, and other bits than before."""
    found = logits(model.eval())
    assert torch.equal(found, logits(expected.eval()))
    assert not torch.equal(found.float(), logits(other().to(found.dtype)).float())


Way = Callable[[Any, Any, Path], Any]  # from one model to another by a folder; returns the model there


def by_torch(one: Any, to: Any, folder: Path) -> Any:
    torch.save(one.state_dict(), folder / "state.pt")
    to.load_state_dict(torch.load(folder / "state.pt"))
    return to


def leniently(one: Any, to: Any, folder: Path) -> Any:
    to.load_state_dict(one.state_dict(), strict=False)
    return to


def by_safetensors(one: Any, to: Any, folder: Path) -> Any:
    save_model(one, str(folder / "model.safetensors"))
    load_model(to, folder / "model.safetensors")
    return to


def by_dcp(one: Any, to: Any, folder: Path) -> Any:
    dcp.save(one.state_dict(), checkpoint_id=folder / "dcp", no_dist=True)
    state = to.state_dict()
    dcp.load(state, checkpoint_id=folder / "dcp", no_dist=True)
    to.load_state_dict(state)
    return to


def by_lightning(one: Any, to: Any, folder: Path) -> Any:
    """As `load_from_checkpoint` does: the module's state dict, with the model as an attribute."""
    torch.save({"state_dict": {f"model.{name}": x for name, x in one.state_dict().items()}}, folder / "last.ckpt")
    module = torch.nn.Module()
    module.model = to
    module.load_state_dict(torch.load(folder / "last.ckpt")["state_dict"])
    return module.model


def by_accelerate(one: Any, to: Any, folder: Path) -> Any:
    for model, call in ((one, "save_state"), (to, "load_state")):
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(model)
        getattr(accelerator, call)(str(folder / "state"))
        accelerator.free_memory()
    return to


def by_averaging(one: Any, to: Any, folder: Path) -> Any:
    averaged = AveragedModel(to, use_buffers=True)
    averaged.update_parameters(one)
    return averaged.module


def by_assignment(one: Any, to: Any, folder: Path) -> Any:
    with torch.device("meta"):
        there: Any = type(to)(copy.deepcopy(to.config))
    there.load_state_dict(one.state_dict(), assign=True)
    there.model.rotary_emb = one.model.rotary_emb  # its buffers are in no state dict
    return there


def by_engine(one: Any, to: Any, folder: Path) -> Any:
    """As vLLM: parameters alone are built on the meta device; buffers for real, and filled in place from the files."""
    one.save_pretrained(folder)
    with init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    held = dict(model.named_buffers())
    for name, value in load_file(folder / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        if name in held:
            held[name].copy_(value)
        else:
            setattr(model.get_submodule(module), kind, torch.nn.Parameter(value, requires_grad=False))
    model.tie_weights()
    return model


def by_dispatch(one: Any, to: Any, folder: Path) -> Any:
    one.save_pretrained(folder)
    with init_empty_weights():
        there: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    there.tie_weights()
    return load_checkpoint_and_dispatch(there, folder, device_map={"": "cpu"})


WAYS: dict[str, Way] = {
    "torch.save": by_torch,
    "not strict": leniently,
    "safetensors": by_safetensors,
    "DCP": by_dcp,
    "Lightning": by_lightning,
    "accelerate's state": by_accelerate,
    "accelerate's dispatch": by_dispatch,
    "averaged weights": by_averaging,
    "deep copy": lambda one, to, folder: copy.deepcopy(one),
    "pickle": lambda one, to, folder: pickle.loads(pickle.dumps(one)),
    "meta device": by_assignment,
    "an engine": by_engine,
}


def case_id(value: Any) -> str:
    return getattr(value, "__name__", value)


@pytest.mark.parametrize(("way", "target"), covering(WAYS, [fresh, other], strength=1), ids=case_id)
def test_a_way_brings_the_knees(way: str, target: Callable[[], Any], tmp_path: Path) -> None:
    assert_moved(WAYS[way](source(), target(), tmp_path), source())


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_a_checkpoint_brings_the_knees_in_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    source().to(dtype).save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=dtype)
    expected = source().to(dtype)
    expected.model.rotary_emb = loaded.model.rotary_emb  # whose buffers a loaded model has in fp32
    assert_moved(loaded, expected)
    loaded.float().save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert [*map(Tensor.tolist, knees_of(again).values())] == [*map(Tensor.tolist, knees_of(source()).values())]


@pytest.mark.parametrize("offload_buffers", [False, True])
def test_offloaded_models_have_the_knees(offload_buffers: bool, tmp_path: Path) -> None:
    source().save_pretrained(tmp_path / "saved")
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu", "model.norm": "disk"}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    options = {"offload_folder": tmp_path / "offload", "offload_buffers": offload_buffers}
    offloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", device_map=places, **options)
    torch.testing.assert_close(logits(offloaded), logits(source()))  # PyTorch norms in place of C++


@pytest.mark.usefixtures("process_group")
def test_shards_bring_the_knees(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (1,))
    for target in (fresh, other):
        sharded = [fully_shard(make(), mesh=mesh) for make in (source, target)]
        set_model_state_dict(sharded[1], get_model_state_dict(sharded[0]))
        assert_moved(sharded[1], sharded[0])
        folder = tmp_path / target.__name__
        dcp.save(get_model_state_dict(sharded[0]), checkpoint_id=folder)
        again = fully_shard(target(), mesh=mesh)
        state = get_model_state_dict(again)
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(again, state)
        assert_moved(again, sharded[0])
        sent = fully_shard(target(), mesh=mesh)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(sent, source().state_dict(), options=options)
        assert_moved(sent, sharded[0])


def test_a_trainer_resumes_with_the_knees(tmp_path: Path) -> None:
    trainer(source(), tmp_path, SaveAt(2)).train()
    found = []
    for model in (source(), fresh(), other()):
        trainer(model, tmp_path, max_steps=4).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        found.append(model)
    for model in found[1:]:
        assert_moved(model, found[0])


def test_adapters_hold_the_knees_of_their_norms(tmp_path: Path) -> None:
    """An adapter whose norms are trained computes the same on a base of another calibration."""
    adapted = wrapped(source())
    adapted.save_pretrained(tmp_path / "one")
    wrapped(other()).save_pretrained(tmp_path / "two")
    model = peft.PeftModel.from_pretrained(other(), tmp_path / "one", adapter_name="one").eval()
    assert_moved(model, adapted)
    model.load_adapter(tmp_path / "two", adapter_name="two")
    model.set_adapter("two")
    assert torch.equal(logits(model), logits(wrapped(other())))
    model.set_adapter("one")
    assert_moved(model, adapted)
    model.delete_adapter("two")
    assert_moved(model, adapted)
    expected = logits(model)
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-5)
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), logits(merged))


def test_an_adapter_of_an_older_version_is_refused(tmp_path: Path) -> None:
    wrapped(source()).save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    save_file({name: x for name, x in load_file(file).items() if not name.endswith(".knee")}, file)
    with pytest.raises(KeyError, match="knee"):
        peft.PeftModel.from_pretrained(source(), tmp_path)


def test_a_merge_of_files_loads_and_is_one_norm_in_every_dtype(tmp_path: Path) -> None:
    """As mergekit makes it: a merge of two calibrations has a shape between both, read on the grid."""
    for name, model in (("one", source()), ("two", other())):
        model.save_pretrained(tmp_path / name)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    merged = {name: 0.7 * x + 0.3 * two[name] for name, x in one.items()}
    save_file(merged, tmp_path / "one" / "model.safetensors", metadata={"format": "pt"})
    wide = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert logits(wide).isfinite().all()
    rounded = copy.deepcopy(wide)
    for name, knee in knees_of(wide).items():
        rounded.get_buffer(name).copy_(knee.bfloat16())
    assert torch.equal(logits(rounded), logits(wide))
