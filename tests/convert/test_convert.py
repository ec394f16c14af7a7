"""Converting a checkpoint gives the same model as patching it in memory, and writes all of it or nothing."""

import json
import os
import signal
import time
from collections import ChainMap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_qknorm import SCHEMES, Calibration, Scheme, calibrate, checkpoint, convert_checkpoint, patch_model
from hf_qknorm.files.names import CARD, CODE_FILE, KEPT_CARD, PLOT, REPORT
from hf_qknorm.model.placement import is_offloaded
from hf_qknorm.norms import NORMS, NormKind
from hf_qknorm.small_model import byte_tokenizer
from qknorm_tests.covering import covering
from qknorm_tests.folders import contents, loaded, save, save_with_tokenizer
from qknorm_tests.kneed import knees_of, logits
from qknorm_tests.slow import slow_but
from qknorm_tests.tables import PAIRS, assert_identical, make_batch, sharp_model, swept, trained_like
from qknorm_tests.tiny import tiny_model

TEXTS = ["to be, or not to be: that is the question. " * 12]
BATCHES = [{"input_ids": torch.randint(3, 60, (4, 24), generator=torch.Generator().manual_seed(i))} for i in range(3)]
FEW = ("arcee", "gpt_neox", "jamba", "zamba")  # transformers renames, joins and shares the tensors of the last three


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "any_type" in metafunc.fixturenames:
        metafunc.parametrize("any_type", slow_but(FEW, swept(metafunc.config)))


@pytest.mark.parametrize(("model_type", "preset"), [(t, name) for t, name in PAIRS if name != "none"])
def test_a_conversion_equals_patching(model_type, preset, tmp_path):
    model = trained_like(model_type, biases=SCHEMES[preset].pre_norm)
    folder = save(model, tmp_path / "source")
    before = contents(folder)
    assert convert_checkpoint(folder, tmp_path / "out", preset) is None
    converted = loaded(tmp_path / "out")
    assert torch.equal(logits(converted), logits(patch_model(model, preset, attn_implementation="hf_qknorm")))
    assert converted.config.scheme == model.config.scheme
    assert converted.config.architectures == [type(model).__name__]
    assert contents(folder) == before
    assert sorted(os.listdir(tmp_path)) == ["out", "source"]


def test_a_cap_is_put_on_each_family(any_type, tmp_path):
    model = sharp_model(any_type)
    # Without the stand-alone code, which takes a second of each family; tests/standalone has it.
    convert_checkpoint(save(model, tmp_path / "source"), tmp_path / "out", "soft_cap", standalone=False)
    tokens = make_batch("plain")["input_ids"]
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(tokens).logits
        assert torch.equal(found, patch_model(model, "soft_cap").eval()(tokens).logits)


@pytest.mark.parametrize("auto", ["AutoModel", "AutoModelForSequenceClassification"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gpt_neox"])
def test_other_heads_and_bare_models(auto, model_type, tmp_path):
    model = getattr(transformers, auto).from_config(sharp_model(model_type).config).eval()
    convert_checkpoint(save(model, tmp_path / "source"), tmp_path / "out", "qk_norm")
    converted = getattr(transformers, auto).from_pretrained(tmp_path / "out")
    batch = make_batch("left", labels=False)
    assert torch.equal(converted(**batch)[0], patch_model(model, "qk_norm")(**batch)[0])


def test_a_checkpoint_in_16_bits_stays_one(tmp_path):
    folder = save(sharp_model("llama").bfloat16(), tmp_path / "source")
    convert_checkpoint(folder, tmp_path / "out", Scheme(q="rms", k="rms", gain="per_head", bias=True))
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert {value.dtype for value in after.values()} == {torch.bfloat16}
    assert len(after) == len(before) + 2 * 2 * 3  # gain, bias and knee
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_which_files_are_copied(llama, tmp_path, capsys):
    (llama / "checkpoint-5").mkdir()
    convert_checkpoint(llama, tmp_path / "out", dry_run=True)
    plan = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.replace("leaves out", "leaves").splitlines())
    assert plan["patches"] == "2 attention layers, 4 norms"
    assert plan["adds"] == "8 tensors, 76 parameters, first model.layers.0.self_attn.q_norm.weight"
    assert plan["destination"].startswith(f"{tmp_path / 'out'} (qknorm_llama, ")
    assert {"checkpoint-5/", "pytorch_model.bin", "training_args.bin"} < set(plan["leaves"].split(", "))
    assert sorted(os.listdir(tmp_path)) == ["source"]
    convert_checkpoint(llama, tmp_path / "out")
    there = set(contents(tmp_path / "out"))
    assert set(plan["copies"].split(", ")) < there
    assert {"LICENSE", "README.md", "chat_template.jinja", "additional_chat_templates/tool.jinja"} <= there
    assert not there & {"pytorch_model.bin", ".gitattributes", "training_args.bin"}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer("to be")["input_ids"]) == "to be"


@pytest.mark.costly
@pytest.mark.parametrize(
    ("model_type", "preset", "options"),
    [
        ("llama", "qk_norm_cap", {"knee": 0}),
        ("llama", "qk_norm", {"knee": 2}),
        ("llama", "qk_norm", {}),
        ("gpt2", "qk_norm_cap", {"knee": 1}),
        ("gpt2", "qkv_norm", {"knee": 0}),
    ],
)
def test_a_calibrated_conversion(model_type, preset, options, tmp_path):
    folder = save_with_tokenizer(trained_like(model_type, vocab_size=300).bfloat16(), tmp_path / "source")
    report = convert_checkpoint(folder, tmp_path / "out", preset, data=TEXTS, **options)
    expected = patch_model(AutoModelForCausalLM.from_pretrained(folder), preset)
    again = calibrate(expected, TEXTS, tokenizer=byte_tokenizer(), **options)
    assert report.loss == pytest.approx(again.loss, abs=1e-5)
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert converted.config.scheme == expected.config.scheme == report.scheme
    state = expected.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in converted.state_dict().items())
    assert report.knee == pytest.approx(options.get("knee", report.knee), rel=0.1)
    assert len(knees_of(converted)) == 2 * len(expected.config.scheme.norms)
    assert Calibration.from_dict(json.loads((tmp_path / "out" / "qk_norm_report.json").read_text())) == report


LIMITS = {"llama": 60_000, "gpt2": "60KB", "mixtral": {"cpu": "60000"}}


@pytest.mark.parametrize(("model_type", "tied", "calibrated"), covering(LIMITS, [False, True], [False, True]))
def test_layers_in_files_give_the_same_bits(model_type, tied, calibrated, tmp_path, monkeypatch):
    source = save(tiny_model(model_type, tie_word_embeddings=tied), tmp_path / "source")
    data, limit = BATCHES if calibrated else None, LIMITS[model_type]
    placed = []
    load = checkpoint._load
    monkeypatch.setattr(
        checkpoint, "_load", lambda *rest, **options: placed.append(load(*rest, **options)) or placed[-1]
    )
    whole = convert_checkpoint(source, tmp_path / "whole", data=data)
    assert not is_offloaded(placed[-1])
    report = convert_checkpoint(source, tmp_path / "out", data=data, max_memory=limit)
    assert is_offloaded(placed[-1])
    files = {name: sorted((tmp_path / name).glob("*.safetensors")) for name in ("whole", "out")}
    assert max(path.stat().st_size for path in files["out"]) < max(path.stat().st_size for path in files["whole"])
    first, second = (ChainMap(*map(load_file, found)) for found in files.values())
    assert_identical(first, second)
    assert report == whole
    assert sorted(os.listdir(tmp_path)) == ["out", "source", "whole"]


def test_norms_are_not_folded_into_weights_in_files(tmp_path):
    source = save(tiny_model("llama"), tmp_path / "source")
    with pytest.raises(ValueError, match="pre_norm=False folds a norm into weights that are not in memory"):
        convert_checkpoint(source, tmp_path / "out", "qkv_norm", max_memory=60_000)
    assert sorted(os.listdir(tmp_path)) == ["source"]


def test_a_name_on_the_hub_is_downloaded_and_the_card_names_it(llama, tmp_path, monkeypatch):
    """Without a report too: the source's own card names the source's base model."""
    asked = {}
    (llama / "README.md").write_text("---\nbase_model: owner/ancestor\n---\n# Theirs\n")
    monkeypatch.setattr(
        checkpoint, "snapshot_download", lambda name, **options: asked.update({name: options}) or str(llama)
    )
    convert_checkpoint("owner/name", tmp_path / "out", "soft_cap")
    assert "*.bin" not in asked["owner/name"]["allow_patterns"]
    assert "*.safetensors" in asked["owner/name"]["allow_patterns"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "base_model: owner/name\n" in card
    assert "[owner/name](https://huggingface.co/owner/name) with a logit cap" in card
    assert "ancestor" not in card


OURS = {"README.md": "---\nlicense: mit\nbase_model: owner/ancestor\n---\n# Theirs\n", KEPT_CARD: "older"}


def test_a_conversion_writes_card_code_and_report(llama, tmp_path):
    for name, text in OURS.items():
        (llama / name).write_text(text)
    out = tmp_path / "out"
    report = convert_checkpoint(llama, out, "qk_norm", data=TEXTS, knee=0)
    assert {CODE_FILE, REPORT, CARD, KEPT_CARD, PLOT} <= {path.name for path in out.iterdir()}
    card = (out / CARD).read_text()
    assert "license: mit" in card
    assert "base_model: owner/ancestor" in card
    assert f"**{report.loss:.3f}**" in card
    assert "`from_pretrained(..., trust_remote_code=True)` runs the repository's `modeling_qknorm.py`" in card
    assert (out / KEPT_CARD).read_text() == OURS[CARD]
    for name in (CARD, REPORT, "config.json"):
        assert str(tmp_path) not in (out / name).read_text(), name
    convert_checkpoint(llama, out, "qk_norm", data=TEXTS, knee=0, overwrite=True)  # replaces all of these files
    AutoModelForCausalLM.from_pretrained(out).save_pretrained(tmp_path / "again")
    assert Calibration.load(tmp_path / "again" / REPORT) == report == Calibration.load(out / REPORT)


def test_files_of_another_conversion_are_not_taken_over(llama, tmp_path):
    convert_checkpoint(llama, tmp_path / "first", "soft_cap", data=TEXTS)
    for name in (CARD, CODE_FILE, REPORT, PLOT):
        (llama / name).write_bytes((tmp_path / "first" / name).read_bytes())
    convert_checkpoint(llama, tmp_path / "out", "qk_norm", standalone=False)
    assert not {CODE_FILE, REPORT, PLOT} & {path.name for path in (tmp_path / "out").iterdir()}
    assert (tmp_path / "out" / CARD).read_text() != (llama / CARD).read_text()


def test_code_that_can_not_be_made_is_refused_with_the_way_out(llama, tmp_path, monkeypatch):
    monkeypatch.setitem(NORMS, "own", NormKind("a norm of one's own"))
    scheme = {"q": "own", "k": "own"}
    for dry_run in (True, False):
        with pytest.raises(ValueError, match="norm 'own' is not hf_qknorm's own.*standalone=False.*--no-standalone"):
            convert_checkpoint(llama, tmp_path / "out", scheme, dry_run=dry_run)
    assert not (tmp_path / "out").exists()
    convert_checkpoint(llama, tmp_path / "out", scheme, standalone=False)
    monkeypatch.setattr("hf_qknorm.standalone.generate.standalone_code", lambda model_type: {}[model_type])
    with pytest.raises(ValueError, match="no stand-alone code can be made for llama .*KeyError: 'llama'"):
        convert_checkpoint(llama, tmp_path / "other", "qk_norm")


def convert(source: Path, out: Path, data: object) -> None:
    convert_checkpoint(source, out, "qk_norm_cap", data=data, knee=data and 0, overwrite=True)


def kills(source: Path, out: Path, data: object, count: int) -> Iterator[int]:
    """Convert in children that are killed after even shares of a conversion's time; yield the signal of each end."""
    start = time.monotonic()
    convert(source, out.with_name("timed"), data)
    seconds = time.monotonic() - start
    for moment in range(count):
        child = os.fork()
        if child == 0:
            try:
                convert(source, out, data)
            finally:
                os._exit(0)
        time.sleep(seconds * 1.2 * moment / count)
        os.kill(child, signal.SIGKILL)
        yield os.waitpid(child, 0)[1]


@pytest.mark.costly
@pytest.mark.parametrize(
    ("data", "count"),
    [(None, 6), *(pytest.param(data, 30, marks=pytest.mark.slow) for data in (None, BATCHES))],
    ids=["fresh", "fresh, often", "calibrated, often"],
)
def test_a_kill_leaves_nothing_or_a_whole_checkpoint(llama, tmp_path, data, count):
    before, out = contents(llama), tmp_path / "out"
    whole, killed = None, 0
    for status in kills(llama, out, data, count):
        whole = whole or contents(tmp_path / "timed")
        killed += os.WIFSIGNALED(status)
        if out.exists():
            assert contents(out) == whole
    assert killed
    assert contents(llama) == before
