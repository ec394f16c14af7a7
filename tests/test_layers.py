"""The package's layout: imports between folders point one way, nothing is above `ops`, and no module is long."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import hf_qknorm

ROOT = Path(hf_qknorm.__file__).parent
LONGEST = 300  # lines


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name, "" for the package itself."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(path: Path) -> Iterator[str]:
    """The modules of the package that a module imports: anywhere in it, for type checkers alone, and by name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            base = node.module or ""
            if base == "hf_qknorm" or base.startswith("hf_qknorm."):
                base = base.removeprefix("hf_qknorm").removeprefix(".")
                names = (f"{base}.{alias.name}".removeprefix(".") for alias in node.names)
                yield from (name if name in MODULES else base for name in names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                assert not alias.name.startswith("hf_qknorm."), f"{path}: import {alias.name}"
                if alias.name == "hf_qknorm":
                    yield ""
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            name = node.args[0]
            if isinstance(name, ast.Constant) and str(name.value).startswith("hf_qknorm."):
                yield str(name.value).removeprefix("hf_qknorm.")


def circle(edges: dict[str, set[str]]) -> list[str] | None:
    """A circle of arrows, or None without one."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def test_modules_do_not_import_each_other_in_a_circle():
    assert circle({name: set(imports(path)) - {name} for name, path in MODULES.items() if name}) is None


@pytest.mark.parametrize("root", ["", "ops."])
def test_folders_do_not_import_each_other_in_a_circle(root):
    """In the package, where a module of its root counts as a folder of its own, and among the folders in `ops/`."""
    edges: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        folder = folder_in(root, name)
        edges.setdefault(folder, set()).update(folder_in(root, x) for x in imports(path) if folder)
        edges[folder] -= {folder, ""}
    assert circle(edges) is None


def folder_in(root: str, name: str) -> str:
    """The folder under `root` that holds a module; "" for one that lies elsewhere, or in `root` itself but for ""."""
    parts = name.removeprefix(root).split(".")
    return parts[0] if name.startswith(root) and (not root or len(parts) > 1) else ""


def test_no_module_is_long():
    lengths = {name: path.read_text(encoding="utf-8").count("\n") for name, path in MODULES.items()}
    assert not {name: lines for name, lines in lengths.items() if lines > LONGEST}


PLAIN = ("reference.py", "__init__.py")
BELOW = ("hf_qknorm.ops", "hf_qknorm.norms", "hf_qknorm.files", "hf_qknorm.version")
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
    for path in (ROOT / "ops").rglob("*.py"):
        lines = re.findall(r"^ *(?:from|import) .*", path.read_text(), re.MULTILINE)
        names = [name for line in lines for name in re.findall(r"(?:from|import) ([\w.]+)", line)[:1]]
        assert not [name for name in names if name.startswith("transformers")], path
        assert all(name.startswith(BELOW) for name in names if name.startswith("hf_qknorm")), path
        assert path.name in PLAIN or not [line for line in lines if "reference" in line], path


@pytest.mark.costly
def test_the_operators_load_without_transformers_or_triton() -> None:
    command = [sys.executable, "-c", ALONE, str(ROOT)]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "hf_qknorm" in loaded
    assert not {"transformers", "triton"} & set(loaded)
