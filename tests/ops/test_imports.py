"""The direction of imports inside `ops`."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_qknorm.ops

FOLDER = Path(hf_qknorm.ops.__file__).parent
FILES = sorted(FOLDER.rglob("*.py"))
PLAIN = ("reference.py", "apply_norm.py", "__init__.py")  # the oracle, and a norm that is its own with gradients
KERNELS = [path for path in FILES if path.name not in PLAIN and path.parent.name != "trust"]
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


def relative(path: Path) -> str:
    return str(path.relative_to(FOLDER))


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_ops_import_nothing_above_them(path: Path) -> None:
    names = imported(ast.walk(ast.parse(path.read_text())))
    assert not [name for name in names if name.startswith("transformers")]
    assert all(name.startswith(BELOW) for name in names if name.startswith("hf_qknorm"))


@pytest.mark.parametrize("path", KERNELS, ids=relative)
def test_kernels_never_import_their_oracle(path: Path) -> None:
    assert not [name for name in imported(ast.walk(ast.parse(path.read_text()))) if "reference" in name]


@pytest.mark.costly
def test_the_operators_load_without_transformers_or_triton() -> None:
    command = [sys.executable, "-c", ALONE, str(FOLDER.parent)]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "hf_qknorm" in loaded
    assert not {"transformers", "triton"} & set(loaded)
