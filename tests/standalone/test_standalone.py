"""The stand-alone file computes the same as the package, without the package."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_qknorm import FAMILIES, SCHEMES, Scheme, convert_checkpoint, patch_model, unpatch_model
from hf_qknorm.families.class_names import AUTO_CLASSES
from hf_qknorm.files.names import CODE_FILE
from hf_qknorm.model.derived import derived_config
from hf_qknorm.standalone.generate import add_standalone, standalone_code
from qknorm_tests.children import WITHOUT_PACKAGE, child
from qknorm_tests.pair import run_once
from qknorm_tests.tables import MODEL_TYPES, assert_near, causal_families, chosen, make_batch, randomise, sharp_model
from qknorm_tests.tiny import tiny_config

BUSY = Scheme(q="rms", k="layer", v="l2", gain="per_head", bias=True, softcap=5.0, scale=0.3)
NORMED, CAPPED = Scheme(q="rms", k="rms", softcap=5.0), Scheme(softcap=5.0)
CASES = {
    **{f"{t} with all": (t, BUSY, "left") for t in ("gpt2", "mixtral")},
    **{f"{t} capped": (t, CAPPED, "left") for t in ("gemma2", "phi3")},
    "deepseek_v3 normed": ("deepseek_v3", NORMED, "left"),  # a latent cache
    "gpt_oss normed": ("gpt_oss", NORMED, "left"),  # sinks
    **{f"llama {name}": ("llama", SCHEMES[name], "plain") for name in ("qk_norm_cap", "qkv_norm", "henry")},
    "gpt2 folded": ("gpt2", SCHEMES["qkv_norm"], "plain"),
    "llama with a knee": ("llama", BUSY, "left"),
    "gpt2 with a knee": ("gpt2", Scheme(q="layer", k="rms"), "left"),
    "mistral lp with a knee": ("mistral", SCHEMES["lp"], "plain"),
    "mistral packed": ("mistral", Scheme(q="l2", softcap=2.0), "packed"),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The cases, and with `--all-families` each family besides."""
    if "case" in metafunc.fixturenames:
        few, refused = [*CASES], {t: FAMILIES[t].refusal(tiny_config(t), NORMED) for t in causal_families()}
        families = {f"family {t}": (t, CAPPED if refused[t] else NORMED, "left") for t in refused}
        metafunc.parametrize("case", chosen(metafunc.config, few, [*few, *families]))
        if metafunc.config.getoption("families") != "few":
            CASES.update(families)


def made(name: str) -> PreTrainedModel:
    model_type, scheme, _ = CASES[name]
    model = patch_model(sharp_model(model_type), scheme)
    return (randomise(model, knee=2.0, sharpness=8.0) if "knee" in name else randomise(model)).eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Each case as a checkpoint with its batch, run where the package can't be imported."""
    places = {name: name.replace(" ", "_") for name in CASES}

    def run(root: Path) -> None:
        for name, place in places.items():
            made(name).save_pretrained(root / place)
            add_standalone(root / place)
            batch = make_batch(CASES[name][2])
            batch.pop("use_cache", None)
            save_file({key: value.contiguous() for key, value in batch.items()}, root / place / "batch.safetensors")
        child(WITHOUT_PACKAGE, *(root / place for place in places.values()), home=root)

    root = run_once(tmp_path_factory, "alone", run)
    return {name: root / place for name, place in places.items()}


@pytest.mark.costly
def test_it_computes_what_the_package_does(case, folders):
    model, batch = made(case), load_file(folders[case] / "batch.safetensors")
    alone = load_file(folders[case] / "alone.safetensors")
    result = model(**batch)
    result.loss.backward()
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    for logits in ("logits", "logits again"):
        assert_near(alone[logits][real], result.logits[real], 1e-5, logits)
    if case.startswith("family"):
        return
    torch.testing.assert_close(alone["loss"], result.loss.detach(), atol=1e-6, rtol=1e-5)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert {f"gradient {name}" for name in gradients} == {name for name in alone if name.startswith("gradient ")}
    for name, gradient in gradients.items():
        torch.testing.assert_close(alone[f"gradient {name}"], gradient, atol=1e-5, rtol=1e-4)
    generated = model.generate(batch["input_ids"][:1, -8:], max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(alone["generated"], generated)


WRONG_KNEES = {
    "missing": (lambda w, name: w.pop(name), "1 norm tensors are missing from the weights"),
    "NaN": (lambda w, name: w[name].fill_(float("nan")), "is [nan, nan, nan], expected three finite numbers"),
    "zero": (lambda w, name: w[name].fill_(0.0), "the last at least 1"),
    "channels": (lambda w, name: w.update({name: torch.ones(16)}), "has shape [16], expected [3]"),
    "integer": (lambda w, name: w.update({name: torch.tensor(3)}), "has dtype I64, expected one of"),
}
LOAD = """
import sys
sys.modules["hf_qknorm"] = None
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    try:
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        print("loaded")
    except ValueError as error:
        print(error)
"""


@pytest.mark.slow
def test_without_the_package_an_invalid_knee_is_refused(tmp_path):
    for case, (change, _) in WRONG_KNEES.items():
        made("llama with a knee").save_pretrained(tmp_path / case)
        add_standalone(tmp_path / case)
        weights = load_file(tmp_path / case / "model.safetensors")
        change(weights, "model.layers.1.self_attn.k_norm.knee")
        save_file(weights, tmp_path / case / "model.safetensors", metadata={"format": "pt"})
    lines = child(LOAD, *(tmp_path / case for case in WRONG_KNEES), home=tmp_path).splitlines()
    for (_, message), line in zip(WRONG_KNEES.values(), lines, strict=True):
        assert message in line
        assert "k_norm.knee" in line


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_file_imports_torch_and_transformers_alone(model_type):
    """It may also import transformers' own requirements, and vLLM must be able to send its classes by value."""
    code = standalone_code(model_type)
    assert "ContextVar" not in code
    assert not [line for line in code.splitlines() if line.startswith("from safetensors")]
    modules = {line.split()[1].partition(".")[0] for line in code.splitlines() if line.startswith(("import ", "from "))}
    assert modules - set(sys.stdlib_module_names) == {"huggingface_hub", "torch", "transformers"}
    longest = max(code.splitlines(), key=len)
    assert len(longest) <= 120, longest


@pytest.mark.slow
def test_an_installed_package_is_used_instead(folders):
    """The package's classes are used with and without `trust_remote_code`, and whether or not it is imported."""
    folder = folders["llama qk_norm_cap"]
    trusted = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(trusted) is type(AutoModelForCausalLM.from_pretrained(folder)) is type(made("llama qk_norm_cap"))
    script = (
        "import sys; from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)\n"
        "print(type(model).__module__, type(model.config).__module__)"
    )
    assert child(script, home=folder.parent).split() == ["hf_qknorm.model.derived", "hf_qknorm.model.derived"]


NAMESAKES = {
    "a clone in the working directory": {"hf_qknorm/README.md": ""},
    "another package with a model": {"hf_qknorm/__init__.py": "", "hf_qknorm/model.py": ""},
    "a version without such a model": {
        "hf_qknorm/__init__.py": "",
        "hf_qknorm/model/__init__.py": "",
        "hf_qknorm/model/derived.py": "",
    },
    "a module that it needs is missing": {"hf_qknorm/__init__.py": "import no_such_module"},
    "a name that is missing": {"hf_qknorm/__init__.py": "from transformers import NoSuchModel"},
}
BROKEN = {
    "a module that it needs is missing": "ModuleNotFoundError: No module named 'no_such_module'",
    "a name that is missing": "ImportError: cannot import name 'NoSuchModel' from 'transformers'",
}
# Each namesake in front of all else on the path, and never the package itself, installed or not.
FOOT = """
import pathlib, sys, traceback, types
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in repr(finder)]
from hf_qknorm_alone import installed_package
sys.path[:] = [place for place in sys.path if not pathlib.Path(place, "hf_qknorm").is_dir()]
for folder in sys.argv[1:]:
    sys.path.insert(0, folder)
    try:
        print(installed_package("QKNormLlamaConfig"))
    except ImportError:
        print(traceback.format_exc().splitlines()[-1])
    sys.path.remove(folder)
    for name in [name for name in sys.modules if name.partition(".")[0] == "hf_qknorm"]:
        del sys.modules[name]
"""


@pytest.mark.slow
def test_another_package_of_the_name_is_ignored_and_a_broken_one_raises(tmp_path):
    (tmp_path / "alone").mkdir()
    code = standalone_code("llama").partition("\npackage = installed_package(")[0]
    (tmp_path / "alone" / "hf_qknorm_alone.py").write_text(code)
    folders = [tmp_path / name.replace(" ", "_") for name in NAMESAKES]
    for folder, files in zip(folders, NAMESAKES.values(), strict=True):
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    script = f"import sys; sys.path.insert(0, {str(tmp_path / 'alone')!r}){FOOT}"
    lines = child(script, *folders, home=tmp_path).splitlines()
    for name, line in zip(NAMESAKES, lines, strict=True):
        assert line.startswith(BROKEN.get(name, "None")), name


def saved(folder: Path) -> dict[str, Any]:
    """The `auto_map` of a folder that has the code, or neither."""
    config = json.loads((folder / "config.json").read_text())
    assert (folder / CODE_FILE).exists() == ("auto_map" in config)
    return config.get("auto_map", {})


def test_every_save_of_a_marked_model_includes_the_code(tmp_path, folders):
    """With the package, and where it can't be imported; until the model is unpatched."""
    model = made("llama qk_norm_cap")
    model.save_pretrained(tmp_path / "plain")
    assert not saved(tmp_path / "plain")
    add_standalone(model)
    model.save_pretrained(tmp_path / "marked")
    AutoModelForCausalLM.from_pretrained(tmp_path / "marked").save_pretrained(tmp_path / "again")
    for name in ("marked", "again"):
        assert (tmp_path / name / CODE_FILE).read_text() == standalone_code("llama")
    mapped = saved(tmp_path / "again")
    assert mapped["AutoConfig"] == "modeling_qknorm.QKNormLlamaConfig"
    assert set(mapped) == {"AutoConfig", *(name for name, names in AUTO_CLASSES.items() if "llama" in names)}
    assert not hasattr(unpatch_model(model).config, "auto_map")
    for folder in folders.values():
        assert saved(folder / "again") == saved(folder)
        assert (folder / "again" / CODE_FILE).read_text() == (folder / CODE_FILE).read_text()
    config = derived_config("llama")(qk_norm="qk_norm")
    assert not config.auto_map
    assert "auto_map" not in config.to_dict()


@pytest.mark.parametrize(("standalone", "options"), [(True, {}), (False, {"standalone": False})])
def test_a_conversion_carries_the_code_unless_told_otherwise(standalone, options, tmp_path):
    """Foreign code that the source's config names is never included."""
    sharp_model("llama").save_pretrained(tmp_path / "source")
    config = json.loads((tmp_path / "source/config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "evil.Model"}
    (tmp_path / "source/config.json").write_text(json.dumps(config))
    convert_checkpoint(tmp_path / "source", tmp_path / "out", "qk_norm", **options)
    assert bool(saved(tmp_path / "out")) == standalone
    assert "evil" not in (tmp_path / "out/config.json").read_text()


def test_what_is_not_patched_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json is missing"):
        add_standalone(tmp_path)
    for content in ('{"model_type": "llama"}', "[]", '{"model_type": "qknorm_rwkv"}'):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match="config.json.*model_type"):
            add_standalone(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    with pytest.raises(ValueError, match="LlamaForCausalLM: model_type is 'llama'"):
        add_standalone(sharp_model("llama"))
    with pytest.raises(TypeError, match="got a Sequential"):
        add_standalone(nn.Sequential(sharp_model("llama")))
