"""`hf-qknorm doctor`: versions, the machine, the attention's numbers, and the exit status, in one screen."""

import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_qknorm
from hf_qknorm import cli, doctor
from hf_qknorm.attend import functions
from hf_qknorm.doctor import NEWEST, check_version, examine
from hf_qknorm.model import raw_heads

LINES, COLUMNS = 24, 120  # of a screen
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_the_report_is_a_screen(capsys):
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(1 + len(line) // COLUMNS for line in lines) <= LINES
    topics = [line[:13].strip() for line in lines]
    assert {"hf-qknorm", "packages", "CPU", "attention"} <= set(topics)
    assert any(topic.startswith("GPU") for topic in topics)
    assert f"{hf_qknorm.__version__}, in {Path(hf_qknorm.__file__).parent}" in lines[0]
    assert f"torch {version('torch')}, transformers {version('transformers')}" in lines[topics.index("packages")]
    assert lines[-1].startswith(f"numbers      right on {DEVICE}: relative error ")


def test_the_attention_that_runs_is_the_one_that_the_package_selects():
    found = [str(line) for line in examine() if line.topic == "attention"]
    runs = [line for line in found if line.endswith(" runs")]
    kernels = ("hf_qknorm_triton" if DEVICE.type == "cuda" else "hf_qknorm_cpu", "hf_qknorm_tiled")
    assert len(runs) == 1
    assert runs[0].endswith(tuple(f"{name} runs" for name in kernels))


@pytest.mark.parametrize(("named", "found"), [("/nowhere/c++", "none"), (f"{sys.executable} -O", sys.executable)])
def test_the_compiler_is_the_one_that_CXX_names(monkeypatch, named, found):
    monkeypatch.setenv("CXX", named)
    assert next(doctor.find_devices()).text.endswith(f"C++ compiler: {found}")


CASES = [
    ("torch", None, ">=2.11", "problem", 'not installed: pip install "torch>=2.11"'),
    ("transformers", "5.9.0", ">=5.17,<6", "problem", "5.9.0, but >=5.17,<6 is needed"),
    ("transformers", "5.24.9.dev0", ">=5.17,<6", "ok", "5.24.9.dev0"),
    ("transformers", "5.25.0", ">=5.17,<6", "note", "5.25.0, which is untested: the tests have run with"),
    ("torch", "2.15.1+cu132", ">=2.11", "ok", "2.15.1+cu132"),
    ("tqdm", "9.9", ">=4.66", "ok", "9.9"),
]


@pytest.mark.parametrize(("name", "number", "needed", "level", "text"), CASES)
def test_versions_are_compared_with_requirements_and_tests(name, number, needed, level, text):
    found = check_version(name, number, needed)
    assert (found.topic, found.level) == (name, level)
    assert found.text.startswith(text)
    assert (level == "ok") == (found.text == number)


def test_tested_versions_fulfil_the_requirements():
    project = tomllib.loads((Path(hf_qknorm.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    needed = {r.name: r.specifier for r in map(Requirement, lines)}
    assert all(needed[name].contains(number) for name, number in NEWEST.items() if name != "python")


def test_an_old_version_is_a_line_of_its_own(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda name: "0.1" if name == "peft" else version(name))
    assert cli.main(["doctor"]) == 1
    printed = capsys.readouterr()
    assert "peft         PROBLEM: 0.1, but >=0.18 is needed: pip install" in printed.out
    assert printed.err == "hf-qknorm: the doctor found problems with peft\n"


def test_versions_are_shown_where_torch_can_not_be_imported(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cli.main(["doctor"]) == 1
    printed = capsys.readouterr()
    assert f"torch {version('torch')}" in printed.out
    assert "machine      PROBLEM: ModuleNotFoundError: " in printed.out
    assert printed.err == "hf-qknorm: the doctor found problems with machine\n"


def test_wrong_numbers_and_failures_are_problems(monkeypatch):
    eager = functions.eager_attention

    def uncapped(*arguments, softcap=None, **options):
        return eager(*arguments, softcap=None, **options)

    def failing(*arguments, **options):
        raise RuntimeError("no kernel image is\navailable")

    monkeypatch.setattr(raw_heads, "fused_attention", lambda *_: None)  # which a GPU takes in place of the function
    for function, text in {
        uncapped: f"numbers      PROBLEM: wrong on {DEVICE}",
        failing: "machine      PROBLEM: RuntimeError: no kernel image is available",
    }.items():
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "hf_qknorm", function)
        *_, found = doctor.examine()
        assert str(found).startswith(text)
