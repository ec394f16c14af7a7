"""axolotl's plugin: its hooks, called as axolotl calls them, and whole runs of axolotl where it is installed."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

import hf_qknorm as qk
from hf_qknorm.integrations.axolotl import BASE, LOG, QKNormPlugin
from qknorm_tests.doc_examples import TEXT, make_folder, training_data

ROOT = Path(__file__).parents[2]
PLUGIN = "hf_qknorm.integrations.axolotl.QKNormPlugin"
CONVERTED = {"qk_norm_scheme": "qk_norm_cap", "qk_norm_calibrate": "corpus.txt", "qk_norm_knee": 4.0}
LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True}
MERGED = {"merge_lora": True}

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")  # peft uses the old name


class Settings(dict):
    """axolotl's settings: a mapping whose keys are attributes too, None if absent."""

    __getattr__ = dict.get
    __setattr__ = dict.__setitem__


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def settings(**keys: Any) -> Settings:
    return Settings({"base_model": "llama", "output_dir": "out"} | keys)


def build(cfg: Settings) -> Any:
    """Call the hooks in axolotl's order, and return the model that they leave, before adapters."""
    plugin = QKNormPlugin()
    plugin.register(cfg)
    cfg.setdefault("tokenizer_config", cfg.base_model)
    plugin.pre_model_load(cfg)
    model = AutoModelForCausalLM.from_pretrained(cfg.base_model)
    plugin.post_model_build(cfg, model)
    return model


def test_the_page_shows_the_keys_that_the_plugin_has():
    fields = pytest.importorskip("hf_qknorm.integrations.axolotl_args", exc_type=ImportError).QKNormPluginArgs
    page = (ROOT / "hf_qknorm/integrations/README.md").read_text(encoding="utf-8")
    table = page.partition("## axolotl")[2].partition("\n- ")[0]
    shown = yaml.safe_load(table.partition("```yaml")[2].partition("```")[0])
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(fields.model_fields)
    assert shown["plugins"] == [PLUGIN]
    assert {key for key in shown if key.startswith("qk")} <= fields.model_fields.keys()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"qk_norm_scheme": "qk_nrm"}, "unknown scheme 'qk_nrm', did you mean 'qk_norm'"),
        ({"qk_norm_scheme": "qk_norm"}, "qk_norm_calibrate is not set: give a text .* or false"),
        (CONVERTED | LORA | {"adapter": "qlora"}, "quantised while it is loaded.* hf-qknorm convert llama FOLDER"),
        (CONVERTED | LORA | {"load_in_8bit": True}, "--scheme qk_norm_cap --data corpus.txt, and set base_model"),
        (CONVERTED | LORA | {"lora_qkv_kernel": True}, "lora_qkv_kernel rewrites .* set lora_qkv_kernel: false"),
        (CONVERTED | {"fused_attn_kernel": True}, "set fused_attn_kernel: false"),
        (CONVERTED | {"attn_implementation": "sdpa"}, "attn_implementation: sdpa can't cap .* Remove the key"),
        (
            LORA | {"qk_clip": 50},
            "qk_clip acts on the weights of queries and keys, which are frozen with adapter: lora",
        ),
        (LORA | {"quack": True}, "quack acts on"),
        (CONVERTED | {"inference": True}, "llama is not patched, .* --base-model=out"),
        (CONVERTED | LORA | MERGED, "the adapter in out needs its patched base model"),
        (CONVERTED | LORA | {"lora_model_dir": "other"}, "there is no other/qk_norm_base"),
    ],
)
def test_keys_that_contradict_each_other_are_refused_before_a_model_is_loaded(keys, message, folder):
    with pytest.raises(ValueError, match=message):
        build(settings(**keys))


def test_a_base_model_is_patched_and_calibrated(folder, caplog):
    caplog.set_level(logging.INFO)
    cfg = settings(**CONVERTED)
    model = build(cfg)
    expected = qk.patch_model(AutoModelForCausalLM.from_pretrained("llama"), "qk_norm_cap")
    report = qk.calibrate(expected, "corpus.txt", knee=4.0)
    assert str(report) in caplog.text
    assert model.config.scheme == expected.config.scheme
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert cfg.attn_decontaminates_packing is True
    assert not Path("out").exists()


def test_fresh_gains_are_asked_for_by_name(folder):
    model = build(settings(qk_norm_scheme="qk_norm", qk_norm_calibrate=False, attn_implementation="sdpa"))
    assert all(bool((p == 1).all()) for n, p in model.named_parameters() if n.endswith("q_norm.weight"))
    assert model.config.scheme.knee == 0
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("adapter", [{}, LORA], ids=["whole", "adapter"])
@pytest.mark.parametrize("keys", [{}, {"qk_norm_scheme": "qk_norm_cap"}, CONVERTED], ids=["none", "scheme", "all"])
def test_a_patched_base_model_stays_as_it_is(keys, adapter, folder):
    qk.convert_checkpoint("llama", "converted", "qk_norm_cap", data="corpus.txt", knee=2.0)
    cfg = settings(**adapter, **keys, base_model="converted")
    model = build(cfg)
    assert model.config.scheme.knee == 2
    for name, value in load_file("converted/model.safetensors").items():
        assert torch.equal(model.state_dict()[name], value), name
    assert cfg.lora_modules_to_save == (["k_norm", "q_norm"] if adapter else None)
    assert cfg.lora_qkv_kernel is (False if adapter else None)


def test_a_patched_base_model_with_another_scheme_is_refused(folder):
    qk.convert_checkpoint("llama", "converted", "qk_norm", data="corpus.txt")
    with pytest.raises(ValueError, match=r"another scheme \(q=rms, k=rms, knee=.*\) than qk_norm_scheme .*softcap=50"):
        build(settings(**CONVERTED, base_model="converted"))


def test_a_quantised_patched_base_model_is_taken(folder):
    qk.convert_checkpoint("llama", "converted", "qk_norm_cap", data="corpus.txt")
    cfg = settings(**CONVERTED, **LORA, base_model="converted", load_in_8bit=True)
    QKNormPlugin().register(cfg)
    pytest.importorskip("bitsandbytes")
    quantised = BitsAndBytesConfig(load_in_8bit=True)
    QKNormPlugin().post_model_build(
        cfg, AutoModelForCausalLM.from_pretrained("converted", quantization_config=quantised)
    )
    assert cfg.lora_modules_to_save == ["k_norm", "q_norm"]


def test_an_adapter_is_trained_merged_and_continued_on_the_base_that_was_written(folder):
    cfg = settings(**CONVERTED, **LORA, lora_modules_to_save=["lm_head"])
    model = build(cfg)
    assert cfg.lora_modules_to_save == ["k_norm", "lm_head", "q_norm"]
    assert cfg.lora_qkv_kernel is False
    assert cfg.lora_o_kernel is False
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=cfg.lora_modules_to_save)
    get_peft_model(model, config).save_pretrained("out/checkpoint-2")
    assert (
        json.loads(Path("out/checkpoint-2/adapter_config.json").read_text())["base_model_name_or_path"] == f"out/{BASE}"
    )
    stored = load_file(f"out/{BASE}/model.safetensors")
    for use in ({"lora_model_dir": "out/checkpoint-2"}, MERGED, MERGED | {"lora_model_dir": "out/checkpoint-2"}):
        later = settings(**CONVERTED, **LORA, **use, revision_of_model="main")
        found = build(later)
        assert later.base_model == f"out/{BASE}"
        assert later.tokenizer_config == "llama"
        assert later.revision_of_model is None
        for name, value in stored.items():
            assert torch.equal(found.state_dict()[name], value), name


def test_an_adapter_run_replaces_its_own_base_alone(folder):
    build(settings(**CONVERTED, **LORA))
    assert build(settings(**CONVERTED | {"qk_norm_knee": 2.0}, **LORA)).config.scheme.knee == 2
    assert AutoModelForCausalLM.from_pretrained(f"out/{BASE}").config.scheme.knee == 2
    Path(f"out/{BASE}/notes").write_text("mine")
    with pytest.raises(FileExistsError, match="contains other files"):
        build(settings(**CONVERTED, **LORA))


def test_a_model_is_watched_and_clipped_without_a_scheme(folder):
    cfg = settings(qk_clip=1e-3, qk_norm_monitor=True)
    model = build(cfg)
    assert model.config.scheme == qk.SCHEMES["none"]
    (clip,) = QKNormPlugin().add_callbacks_pre_trainer(cfg, model)
    assert isinstance(clip, qk.QKClip)
    assert clip.threshold == 1e-3
    untouched = settings()
    assert type(build(untouched)).__name__ == "LlamaForCausalLM"
    assert QKNormPlugin().add_callbacks_pre_trainer(untouched, build(untouched)) == []


@pytest.mark.parametrize(
    ("key", "schedule"), [("qk_norm_blend_share", qk.BlendSchedule), ("qk_norm_knee_share", qk.KneeSchedule)]
)
def test_schedules(key, schedule, folder):
    cfg = settings(**CONVERTED, **{key: 0.25})
    (callback,) = QKNormPlugin().add_callbacks_pre_trainer(cfg, build(cfg))
    assert isinstance(callback, schedule)
    assert callback.share == 0.25


@pytest.mark.parametrize(("quack", "tau"), [(True, 1.0), (0.5, 0.5)])
def test_the_trainer_gets_the_monitor_and_quack(quack, tau, folder):
    cfg = settings(**CONVERTED, qk_norm_monitor=2, quack=quack)
    model = build(cfg)
    arguments = TrainingArguments("out", max_steps=2, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True)
    trainer = Trainer(model, arguments, train_dataset=training_data())
    QKNormPlugin().post_trainer_create(cfg, trainer)
    trainer.train()
    wrapped = trainer.optimizer.optimizer  # accelerate wraps the optimiser too
    assert isinstance(wrapped, qk.QuacK)
    assert wrapped.tau == tau
    assert wrapped.first  # it has taken steps
    assert [json.loads(line)["step"] for line in Path("out", LOG).read_text().splitlines()] == [2]


def run_axolotl(command: str, keys: dict[str, Any], *options: str, prompt: str = "") -> str:
    """Run one of axolotl's commands on the CPU, in the working directory, and return its output."""
    Path("config.yml").write_text(yaml.safe_dump(keys), encoding="utf-8")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "AXOLOTL_DO_NOT_TRACK": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "1",
    }
    call = [sys.executable, "-m", "axolotl.cli.main", command, "config.yml", *options]
    done = subprocess.run(call, input=prompt, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def axolotl_keys(folder: Path) -> dict[str, Any]:
    """The keys of a short run of axolotl on the CPU."""
    pytest.importorskip("axolotl")
    rows = [{"text": TEXT[i : i + 200]} for i in range(0, len(TEXT), 200)]
    Path("train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return {
        "base_model": "llama",
        "output_dir": "out",
        "datasets": [{"path": "train.jsonl", "ds_type": "json", "type": "completion"}],
        "dataset_prepared_path": "prepared",
        "sequence_len": 64,
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "optimizer": "adamw_torch",
        "lr_scheduler": "constant",
        "bf16": False,
        "fp16": False,
        "tf32": False,
        "save_strategy": "no",
        "plugins": [PLUGIN],
        **CONVERTED,
    }


def test_axolotl_trains_a_whole_model(axolotl_keys):
    output = run_axolotl("train", axolotl_keys | {"qk_norm_monitor": 1, "quack": True}, "--launcher", "python")
    assert "moments, knee 4: loss" in output
    model = AutoModelForCausalLM.from_pretrained("out")
    assert (model.config.scheme.softcap, model.config.scheme.knee) == (50.0, 4.0)
    assert len(Path("out", LOG).read_text().splitlines()) == 3


@pytest.mark.parametrize("method", ["memory_efficient", "legacy"])
def test_axolotl_merges_an_adapter_with_its_trained_gains(method, axolotl_keys):
    keys = axolotl_keys | LORA | {"merge_method": method}
    run_axolotl("train", keys, "--launcher", "python")
    run_axolotl("merge-lora", keys)
    ids = training_data()[0]["input_ids"][None]
    adapter = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(f"out/{BASE}"), "out").eval()
    merged = AutoModelForCausalLM.from_pretrained("out/merged").eval()
    gains = {name: gain for name, gain in merged.named_parameters() if "_norm.weight" in name and "self_attn" in name}
    fresh = load_file(f"out/{BASE}/model.safetensors")
    assert not any(torch.equal(gain, fresh[name]) for name, gain in gains.items())
    torch.testing.assert_close(merged(ids).logits, adapter(ids).logits, rtol=1e-4, atol=1e-4)


def test_axolotl_shows_the_plugins_errors(axolotl_keys):
    with pytest.raises(AssertionError, match="qk_norm_calibrate is not set"):
        run_axolotl("train", axolotl_keys | {"qk_norm_calibrate": None}, "--launcher", "python")
