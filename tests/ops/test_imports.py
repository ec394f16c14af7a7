"""The direction of imports inside `ops`."""

import ast
import subprocess
import sys
from collections.abc import Iterator
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


def imported(nodes: Iterator[ast.AST]) -> set[str]:
    """The full names in import statements."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names}
    return names


def test_ops_import_nothing_above_them_and_kernels_not_their_oracle() -> None:
    for path in FOLDER.rglob("*.py"):
        names = imported(ast.walk(ast.parse(path.read_text())))
        assert not [name for name in names if name.startswith("transformers")], path
        assert all(name.startswith(BELOW) for name in names if name.startswith("hf_qknorm")), path
        assert path.name in PLAIN or not [name for name in names if "reference" in name], path


@pytest.mark.costly
def test_the_operators_load_without_transformers_or_triton() -> None:
    command = [sys.executable, "-c", ALONE, str(FOLDER.parent)]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "hf_qknorm" in loaded
    assert not {"transformers", "triton"} & set(loaded)
