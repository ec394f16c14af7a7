"""Batches of the user's: all inputs of the model count, padding and ignored labels do not; processes."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import WhisperConfig, WhisperForConditionalGeneration

from hf_qknorm import calibrate, inspect_model, patch_model
from hf_qknorm.model.attention import every_norm
from qknorm_tests.tables import random_tokens as tokens
from qknorm_tests.tiny import tiny_model

IDS = tokens(1, 48)
PLACES = torch.arange(48).remainder(6)[None]  # of documents of 6 tokens in a packed row
STARTS = PLACES == 0
MASK = torch.ones_like(IDS)
MASK[0, :9] = 0
PROMPT = IDS.masked_fill(torch.arange(48) < 10, -100)

# name: (model type, the batch, the labels by which the model computes the loss)
BATCHES: dict[str, tuple[str, dict[str, Tensor], Tensor]] = {
    "plain": ("llama", {}, IDS),
    "packed": ("llama", {"position_ids": PLACES}, IDS.masked_fill(STARTS, -100)),
    "prompts": ("llama", {"labels": PROMPT}, PROMPT),
    "padded": ("gpt2", {"attention_mask": MASK}, IDS.masked_fill(MASK.cumsum(1) < 2, -100)),  # nor the first token
    "types": ("gpt2", {"token_type_ids": tokens(1, 48, seed=1)}, IDS),
    "masked": ("bert", {"labels": PROMPT, "token_type_ids": torch.ones_like(IDS)}, PROMPT),
}


@pytest.mark.parametrize("name", BATCHES)
def test_the_loss_is_that_of_training_on_the_same_batch(name):
    model_type, inputs, labels = BATCHES[name]
    model = tiny_model(model_type, initializer_range=0.3)
    inputs = {"input_ids": IDS, **inputs}
    with torch.no_grad():
        expected = model(**inputs | {"labels": labels}, use_cache=False).loss.item()
    batches = [inputs | {"id": torch.arange(1), "text": ["a"]}]
    count = int(inputs.get("attention_mask", torch.ones_like(IDS)).sum())
    if model_type != "bert":
        found = inspect_model(model, batches)
        assert found.base.loss == pytest.approx(expected, rel=1e-5)
        assert (found.tokens, found.length) == (count, count)
    report = calibrate(patch_model(model, "qk_norm"), batches, knee=0)
    assert report.base.loss == pytest.approx(expected, rel=1e-5)
    assert (report.tokens, report.judged, report.length) == (count, count, count)


def test_packed_documents_give_the_knees_and_gains_of_separate_ones():
    found = []
    for batch in ({"input_ids": IDS, "position_ids": PLACES}, {"input_ids": IDS.view(8, 6)}):
        model = patch_model(tiny_model("llama", initializer_range=0.3), "qk_norm")
        calibrate(model, [batch] * 4, knee=2)
        found.append([x for norm in every_norm(model) for x in (*norm.weight.tolist(), norm.mean_power())])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.parametrize("knee", [None, 2.0])
def test_the_default_device_changes_nothing(knee):
    found = []
    for device in ("cpu", "meta"):  # a tensor without a device of its own would have no data
        model = patch_model(tiny_model("llama", initializer_range=0.3), "qk_norm")
        with torch.device(device):
            reports = calibrate(model, [IDS] * 4, knee=knee), inspect_model(model, [IDS])
        found.append((reports, [x.tolist() for x in model.state_dict().values()]))
    assert found[0] == found[1]


def test_mostly_padding_is_few_tokens(caplog):
    batch = {"input_ids": tokens(8, 96), "attention_mask": (torch.arange(96) < 6).long().expand(8, -1)}
    report = calibrate(patch_model(tiny_model("llama"), "qk_norm"), [batch] * 8, max_tokens=200)
    assert (report.tokens, report.judged, report.length) == (5 * 48, 120, 6)
    assert "on 120 tokens, which is uncertain" in caplog.text


def sharded(model: Any) -> Any:
    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


@pytest.mark.parametrize(("wrap", "name"), [(DistributedDataParallel, "DistributedDataParallel"), (sharded, "FSDP2")])
def test_a_model_for_several_processes_is_refused_with_the_right_order(wrap, name, process_group):
    model = wrap(patch_model(tiny_model("llama"), "qk_norm"))
    with pytest.raises(ValueError, match=f"wrapped or sharded by {name}.* before accelerator.prepare"):
        calibrate(model, [IDS])


def test_an_encoder_decoder_is_refused_as_one():
    config = WhisperConfig(
        vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, suppress_tokens=[], begin_suppress_tokens=[],
    )  # fmt: skip
    model = patch_model(WhisperForConditionalGeneration(config), "qk_norm")
    with pytest.raises(ValueError, match="whisper is an encoder-decoder, .*soft_cap, which needs no calibration"):
        calibrate(model, [{"input_features": torch.zeros(1, 80, 3000), "labels": IDS[:1]}])
