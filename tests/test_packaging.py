"""The wheel has every module, the type marker, and the template and papers of model cards."""

import shutil
import zipfile
from pathlib import Path

import pytest

import hf_qknorm
from qknorm_tests.children import child

ROOT = Path(hf_qknorm.__file__).parents[1]
BUILD = "import os, sys; from setuptools import build_meta; os.chdir(sys.argv[1]); build_meta.build_wheel(sys.argv[2])"

pytestmark = pytest.mark.costly


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    pytest.importorskip("setuptools.build_meta")
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "hf_qknorm", folder / "source" / "hf_qknorm", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source" / name)
    child(BUILD, folder / "source", folder, home=folder)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_has_every_file_of_the_package(wheel):
    kept = [
        path for path in (ROOT / "hf_qknorm").rglob("*") if path.suffix in (".py", ".jinja", ".typed", ".h", ".cpp")
    ]
    expected = {path.relative_to(ROOT).as_posix() for path in kept}
    assert {"hf_qknorm/py.typed", "hf_qknorm/convert/card.md.jinja"} <= expected
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert files == expected
