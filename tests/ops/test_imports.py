"""The direction of imports inside `ops`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import hf_qknorm.ops

FOLDER = Path(hf_qknorm.ops.__file__).parent
PLAIN = ("reference.py", "__init__.py")
BELOW = ("hf_qknorm.ops", "hf_qknorm.files", "hf_qknorm.version")
ALONE = """
import sys, types
import torch
before = set(sys.modules)
package = types.ModuleType("hf_qknorm")
package.__path__ = [sys.argv[1]]
sys.modules["hf_qknorm"] = package
import hf_qknorm.ops.library
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before}))
"""


def test_ops_import_nothing_above_them_and_kernels_not_their_oracle() -> None:
    for path in FOLDER.rglob("*.py"):
        lines = re.findall(r"^ *(?:from|import) .*", path.read_text(), re.MULTILINE)
        names = [name for line in lines for name in re.findall(r"(?:from|import) ([\w.]+)", line)[:1]]
        assert not [name for name in names if name.startswith("transformers")], path
        assert all(name.startswith(BELOW) for name in names if name.startswith("hf_qknorm")), path
        assert path.name in PLAIN or not [line for line in lines if "reference" in line], path


@pytest.mark.costly
def test_the_operators_load_without_transformers_or_triton() -> None:
    command = [sys.executable, "-c", ALONE, str(FOLDER.parent)]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "hf_qknorm" in loaded
    assert not {"transformers", "triton"} & set(loaded)
