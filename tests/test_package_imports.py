"""Importing the package: quiet, without heavy packages, with every public name; and the wheel, with every file."""

import ast
import inspect
import pickle
import shutil
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

import hf_qknorm
from qknorm_tests.children import child

HEAVY = (
    "accelerate", "bitsandbytes", "datasets", "matplotlib", "peft", "torch._dynamo", "transformers.modeling_utils",
    "transformers.trainer", "triton",
)  # fmt: skip


@pytest.mark.costly
def test_the_import_prints_nothing_and_loads_no_heavy_module(tmp_path):
    """Beyond those that transformers' Auto classes load, which differ by its version."""
    script = (
        "import sys, transformers.models.auto.modeling_auto, transformers.models.auto.tokenization_auto\n"
        "before = set(sys.modules)\n"
        "import hf_qknorm\n"
        f"print([name for name in {HEAVY} if name in sys.modules and name not in before])\n"
    )
    assert child(script, home=tmp_path, fresh=True) == "[]\n"


def test_names_that_load_when_first_used_are_those_that_type_checkers_see():
    tree = ast.parse(Path(hf_qknorm.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {node.module: tuple(alias.name for alias in node.names) for node in block.body}
    assert seen == {f"hf_qknorm.{module}": names for module, names in hf_qknorm._LATE.items()}


@pytest.mark.slow
def test_names_that_load_when_first_used_are_the_modules_own(tmp_path):
    names = [(module, name) for module, names in hf_qknorm._LATE.items() for name in names]
    for module, name in names:
        assert getattr(hf_qknorm, name) is getattr(import_module(f"hf_qknorm.{module}"), name)
    listed = "import hf_qknorm\nprint(set(hf_qknorm.__all__) <= set(dir(hf_qknorm)))\n"
    starred = "from hf_qknorm import *\nprint(QKClip.__module__, set_knee.__module__)\n"
    assert child(listed + starred, home=tmp_path) == "True\nhf_qknorm.training.clip hf_qknorm.model.knees\n"


def test_public_names_resolve_and_pickle_by_reference():
    for value in (getattr(hf_qknorm, name) for name in hf_qknorm.__all__):
        if inspect.isclass(value) or inspect.isfunction(value):
            assert pickle.loads(pickle.dumps(value)) is value


def test_twenty_names_are_public_and_one_that_is_gone_names_its_replacement():
    assert len(hf_qknorm.__all__) <= 20
    for name, instead in hf_qknorm._GONE.items():
        assert name not in hf_qknorm.__all__
        with pytest.raises(AttributeError) as error:
            getattr(hf_qknorm, name)
        assert str(error.value) == f"hf_qknorm.{name} is gone: {instead}"
    with pytest.raises(AttributeError, match="no attribute"):
        getattr(hf_qknorm, name.lower() + "_modle")


ROOT = Path(hf_qknorm.__file__).parents[1]
BUILD = "import os, sys; from setuptools import build_meta; os.chdir(sys.argv[1]); build_meta.build_wheel(sys.argv[2])"


@pytest.mark.costly
def test_the_wheel_has_every_file_of_the_package(tmp_path):
    pytest.importorskip("setuptools.build_meta")
    shutil.copytree(ROOT / "hf_qknorm", tmp_path / "source" / "hf_qknorm", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "source" / name)
    child(BUILD, tmp_path / "source", tmp_path, home=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    suffixes = (".py", ".jinja", ".typed", ".h", ".cpp")
    kept = [path for path in (ROOT / "hf_qknorm").rglob("*") if path.suffix in suffixes]
    expected = {path.relative_to(ROOT).as_posix() for path in kept}
    assert {"hf_qknorm/py.typed", "hf_qknorm/convert/card.md.jinja"} <= expected
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert files == expected
