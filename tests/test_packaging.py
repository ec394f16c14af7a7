"""The wheel has every module, the type marker, and the template and papers of model cards."""

from __future__ import annotations

import re
import shutil
import zipfile
from pathlib import Path

import pytest

import hf_qknorm
from qknorm_tests.children import child

ROOT = Path(hf_qknorm.__file__).parents[1]
PACKAGES = ("hf_qknorm", "hf_qknorm_command")
BUILD = (
    "import os, sys\nfrom setuptools import build_meta\nos.chdir(sys.argv[1])\nbuild_meta.build_wheel(sys.argv[2])\n"
)


pytestmark = pytest.mark.costly


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    pytest.importorskip("setuptools.build_meta")
    folder = tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source" / name)
    child(BUILD, folder / "source", folder, home=folder)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_has_every_file_of_the_package(wheel):
    files = [path for name in PACKAGES for path in (ROOT / name).rglob("*")]
    kept = [path for path in files if path.suffix in (".py", ".jinja", ".bib", ".typed", ".h", ".cpp")]
    expected = {path.relative_to(ROOT).as_posix() for path in kept}
    assert {"hf_qknorm/py.typed", "hf_qknorm/hub/card.md.jinja", "hf_qknorm/hub/papers.bib"} <= expected
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert files == expected


@pytest.mark.slow
def test_an_installed_wheel_renders_a_card(wheel, tmp_path):
    """Imported from the wheel's files alone, in a folder without the repository."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    script = (
        f"import sys\nsys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "import hf_qknorm\nfrom hf_qknorm.hub import card\n"
        "print(hf_qknorm.__file__, card._template().name)\n"
        "print(*(paper.bibtex.partition('{')[0] for paper in card.papers.PAPERS.values()))\n"
    )
    file, entries = child(script, home=tmp_path).splitlines()
    assert file == f"{tmp_path / 'site/hf_qknorm/__init__.py'} card.md.jinja"
    kinds = re.findall(r"^@\w+", (ROOT / "hf_qknorm/hub/papers.bib").read_text(), re.MULTILINE)
    assert sorted(entries.split()) == sorted(kinds)
