"""`hf-qknorm doctor`: versions, the machine, the attention's numbers, and the exit status."""

from __future__ import annotations

import json
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
from hf_qknorm.attend import functions, implementations
from hf_qknorm.model import raw_heads
from hf_qknorm_command.findings import TESTED, check_version

TOPICS = (
    "hf-qknorm", "python", "torch", "transformers", "integrations", "CPU", "Triton", "C++ compiler",
    "hf_qknorm", "hf_qknorm_triton", "hf_qknorm_cpu", "self-check",
)  # fmt: skip
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def examined(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, str]], str]:
    """The command's exit status, its findings by topic, and its errors."""
    status = cli.main(["doctor", "--json"])
    out, err = capsys.readouterr()
    return status, {finding["topic"]: finding for finding in json.loads(out)}, err


def test_the_doctor_reports_every_topic_as_text_and_as_json(capsys):
    status, found, error = examined(capsys)
    assert status == 0, error
    assert set(TOPICS) <= set(found)
    assert found["hf-qknorm"]["text"].startswith(f"{hf_qknorm.__version__}, in {Path(hf_qknorm.__file__).parent}")
    assert found["torch"]["text"].startswith(version("torch"))
    assert found["self-check"]["text"].startswith(f"passed on {DEVICE}: relative error ")
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:17].strip() for line in lines] == list(found)
    assert lines[-1].partition("error")[0] == f"self-check       passed on {DEVICE}: relative "


def test_the_attention_is_the_one_that_the_package_selects(capsys, monkeypatch, caplog):
    monkeypatch.setattr(implementations, "_logged", set())
    with caplog.at_level("INFO", logger="hf_qknorm"):
        _, found, _ = examined(capsys)
    assert f"hf_qknorm attention {found['hf_qknorm']['text']}" in caplog.text  # the log of the attention that ran


@pytest.mark.parametrize("named", ["/nowhere/c++", "nowhere g++"])
def test_the_compiler_is_the_one_that_CXX_names(monkeypatch, named):
    monkeypatch.setenv("CXX", named)
    assert [*doctor._compilers()][-1].text.startswith("none (for attention")
    monkeypatch.setenv("CXX", f"{sys.executable} -O")
    assert [*doctor._compilers()][-1].text.startswith(f"{sys.executable} (for attention")


CASES = [
    ("torch", None, ">=2.11", "problem", 'not installed: pip install "torch>=2.11"'),
    ("transformers", "5.9.0", ">=5.17,<6", "problem", "5.9.0, but >=5.17,<6 is needed"),
    ("transformers", "6.0.0", ">=5.17,<6", "problem", "6.0.0, but"),
    ("transformers", "5.17.3", ">=5.17,<6", "ok", "5.17.3"),
    ("transformers", "5.24.9.dev0", ">=5.17,<6", "ok", "5.24.9.dev0"),
    ("transformers", "5.25.0", ">=5.17,<6", "note", "5.25.0, which is untested: the tests have run with 5.17 to 5.24"),
    ("torch", "2.15.1+cu132", ">=2.11", "ok", "2.15.1+cu132"),
    ("torch", "2.16.0", ">=2.11", "note", "2.16.0, which is untested: the tests have run with 2.11 to 2.15"),
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
    for name in TESTED.keys() - {"python"}:
        assert all(needed[name].contains(number) for number in TESTED[name])


def test_a_package_that_can_not_be_imported_is_a_problem(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "hf_qknorm.doctor", None)
    monkeypatch.delattr(hf_qknorm, "doctor")
    status, found, error = examined(capsys)
    assert status == 1
    assert found["torch"]["level"] == "ok"
    assert found["import"]["text"].startswith("the package can't be imported: ")
    assert error == "hf-qknorm: the doctor found problems with import\n"


def test_wrong_numbers_and_failures_are_problems(capsys, monkeypatch):
    eager = functions.eager_attention

    def uncapped(*arguments, softcap=None, **options):
        return eager(*arguments, softcap=None, **options)

    def failing(*arguments, **options):
        raise RuntimeError("no kernel image is\navailable")

    monkeypatch.setattr(raw_heads, "fused_attention", lambda *_: None)
    for function, text in {
        uncapped: f"wrong numbers on {DEVICE}",
        failing: f"attention fails in torch.float32 on {DEVICE}: RuntimeError: no kernel image is available",
    }.items():
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "hf_qknorm", function)
        found = doctor.check_attention(DEVICE)
        assert found.level == "problem"
        assert found.text.startswith(text)
    status, found, error = examined(capsys)
    assert status == 1
    assert error == "hf-qknorm: the doctor found problems with self-check\n"
