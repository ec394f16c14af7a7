"""The wheel has every module, the type marker, and the template and papers of model cards."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest

import hf_qknorm
from qknorm_tests.children import child

ROOT = Path(hf_qknorm.__file__).parents[1]
PACKAGES = ("hf_qknorm",)
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
    kept = [path for path in files if path.suffix in (".py", ".jinja", ".typed", ".h", ".cpp")]
    expected = {path.relative_to(ROOT).as_posix() for path in kept}
    assert {"hf_qknorm/py.typed", "hf_qknorm/convert/card.md.jinja"} <= expected
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
        "import hf_qknorm, torch\nfrom hf_qknorm.convert.card import render_card\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "model = LlamaForCausalLM(LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2))\n"
        f"hf_qknorm.patch_model(model, 'qk_norm').save_pretrained({str(tmp_path / 'model')!r})\n"
        f"print(hf_qknorm.__file__, render_card({str(tmp_path / 'model')!r}).count('## '))\n"
    )
    assert child(script, home=tmp_path).split() == [f"{tmp_path / 'site/hf_qknorm/__init__.py'}", "4"]
