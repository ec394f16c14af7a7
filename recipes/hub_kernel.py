"""Build the capped attention as a kernel for the Hub, from the package's own sources.

    python recipes/hub_kernel.py org --output kernel

transformers loads the result by `attn_implementation="org/qknorm-attention"`. The folder has a source tree for
kernel-builder (`build.toml`, `torch-ext`, …) and the layout that is published (`build`). `recipes/hub_kernel/README.md`
describes both, and how to publish and load them.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import json
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2 import Template

import hf_qknorm
from hf_qknorm.files.atomic_io import new_folder

PACKAGE = "hf_qknorm"
SOURCES = Path(hf_qknorm.__file__).parent
PARTS = Path(__file__).with_suffix("")  # the files of the kernel that are not the package's
NAME = "qknorm-attention"
PLACEHOLDER = f"org/{NAME}"  # in these files, for the repository
NAMESPACE = f"{PACKAGE}.ops._ops"  # the module that each build replaces by one with a namespace of its own
ALLOWED = {*sys.stdlib_module_names, "torch", "triton"}  # packages that a kernel may import
PYTHON = (3, 9)  # the oldest version whose syntax a kernel may use

OPS = '''"""The namespace of this build's operators in `torch.ops`: unique, so that several builds can be loaded."""

import torch

ops = torch.ops.{id}


def add_op_namespace_prefix(op_name: str) -> str:
    """The operator's name with its namespace."""
    return f"{id}::{{op_name}}"
'''
# Older versions of `kernels` import the folder of the kernel's name.
FORMER_PLACE = '''"""The kernel at the place where older versions of `kernels` look for it."""

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location("{id}", Path(__file__).parent.parent / "__init__.py")
_module = importlib.util.module_from_spec(_spec)
sys.modules["{id}"] = _module
_spec.loader.exec_module(_module)
globals().update({{name: getattr(_module, name) for name in _module.__all__}})
__all__ = _module.__all__
'''


def build(org: str, folder: Path) -> None:
    """Write the kernel `org/qknorm-attention` to `folder`, which must be absent or empty.

    Raises ValueError for an `org` that is no name of a publisher, and for sources that break the rules for kernels,
    FileExistsError for a folder with files.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", org):
        raise ValueError(f"expected the name of a user or an organisation on the Hub, got {org!r}")
    files = (path for path in PARTS.iterdir() if path.is_file())
    parts = {path.name: path.read_text(encoding="utf-8").replace(PLACEHOLDER, f"{org}/{NAME}") for path in files}
    general = tomllib.loads(parts["build.toml"])["general"]
    code = kernel_code(parts.pop("attention_function.py"))

    def check() -> None:
        if folder.exists() and any(folder.iterdir()):
            raise FileExistsError(f"{folder} has files: expected a new or an empty folder")

    with new_folder(folder, check) as new:
        module = general["name"].replace("-", "_")
        write(new / "torch-ext" / module, code)
        write(
            new,
            {
                "build.toml": parts["build.toml"],
                "flake.nix": parts["flake.nix"],
                "CARD.md": parts["CARD.md.jinja"],
                "tests/__init__.py": "",
                f"tests/test_{module}.py": parts["test_kernel.py"],
                "benchmarks/benchmark.py": parts["benchmark.py"],
                "build/CARD.md": card(parts),
            },
        )
        shutil.copy(SOURCES.parent / "LICENSE", new)
        for backend in general["backends"]:
            write(new / "build" / f"torch-{backend}", variant(parts, backend, code))


def kernel_code(entry: str) -> dict[str, str]:
    """The kernel's modules, by path: `entry`, and each module of the package that these import, with relative imports.

    Raises ValueError, naming module and line, for code that a kernel must not have.
    """
    found: dict[str, str] = {}
    waiting = {PACKAGE: entry}
    while waiting:
        name, text = waiting.popitem()
        found[name] = text
        for target in targets(name, text):
            for parent in parents(target):
                if parent not in (*found, NAMESPACE):
                    code = source(parent).read_text(encoding="utf-8")
                    waiting[parent] = f"# From {PACKAGE} {hf_qknorm.__version__}. Apache-2.0.\n{code}"
    return {place(name): relative(name, text) for name, text in sorted(found.items())}


def targets(name: str, text: str) -> Iterator[str]:
    """The package's modules that a module imports, wherever in it; ValueError for code that a kernel must not have."""
    for node in ast.walk(ast.parse(text, name, feature_version=PYTHON)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE:
            assert node.module is not None
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (target if source(target).is_file() else node.module for target in inner)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or "."] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            for imported in names:
                if imported.partition(".")[0] not in ALLOWED:
                    raise ValueError(f"{name}, line {node.lineno}: a kernel must not import {imported}")


def parents(name: str) -> Iterator[str]:
    """A module and the folders that it lies in, without the package itself."""
    while name != PACKAGE:
        yield name
        name = name.rpartition(".")[0]


def source(name: str) -> Path:
    """The file of one of the package's modules."""
    path = SOURCES.joinpath(*name.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def place(name: str) -> str:
    """The path of a module in the kernel."""
    path = source(name).relative_to(SOURCES) if name != PACKAGE else Path("__init__.py")
    return path.as_posix()


def relative(name: str, text: str) -> str:
    """A module's code with relative imports of the package's modules."""
    here = Path(place(name)).parent.parts

    def line(found: re.Match[str]) -> str:
        module = found["module"]
        there = ["_ops"] if module == NAMESPACE else module.split(".")[1:]
        shared = 0
        while shared < min(len(here), len(there)) and here[shared] == there[shared]:
            shared += 1
        return f"{found['indent']}from {'.' * (len(here) - shared + 1)}{'.'.join(there[shared:])} import "

    return re.sub(rf"^(?P<indent>\s*)from (?P<module>{PACKAGE}[\w.]*) import ", line, text, flags=re.MULTILINE)


def variant(parts: dict[str, str], backend: str, code: dict[str, str]) -> dict[str, str]:
    """The files of a published build: the code, its namespace and its metadata."""
    settings = tomllib.loads(parts["build.toml"])
    general = settings["general"]
    module = general["name"].replace("-", "_")
    unique = hashlib.sha256(json.dumps(code).encode()).hexdigest()[:7]
    identifier = f"_{module}_{backend}_{unique}"
    files = {**code, "_ops.py": OPS.format(id=identifier)}
    files[f"{module}/__init__.py"] = FORMER_PLACE.format(id=identifier)
    metadata: dict[str, Any] = {
        "name": general["name"],
        "id": identifier,
        "version": general["version"],
        "license": general["license"],
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": {name: digest(text) for name, text in sorted(files.items())}},
    }
    if backend == "cuda":
        metadata["backend"]["archs"] = settings["torch-noarch"]["cuda_capabilities"]
    return {**files, "metadata.json": json.dumps(metadata, indent=2) + "\n"}


def digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def card(parts: dict[str, str]) -> str:
    """The page of the repository, as kernel-builder renders it."""
    general = tomllib.loads(parts["build.toml"])["general"]
    values = {"repo_id": general["hub"]["repo-id"], "version": general["version"], "license": general["license"]}
    return Template(parts["CARD.md.jinja"], keep_trailing_newline=True).render(**values)


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("org", help="the user or organisation on the Hub that will publish the kernel")
    parser.add_argument("--output", type=Path, required=True, help="a new or an empty folder")
    options = parser.parse_args()
    build(options.org, options.output)
    variants = sorted(path.name for path in (options.output / "build").glob("torch-*"))
    print(f"written: {options.output} ({', '.join(variants)})")
    print(f"try it:  LOCAL_KERNELS={options.org}/{NAME}={options.output.resolve()} python your_script.py")


if __name__ == "__main__":
    main()
