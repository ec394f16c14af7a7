"""The recipes are scripts, not a package: the tests import them from their folders."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path[:0] = [str(RECIPES), str(RECIPES / "benchmarks")]


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> str:
    """A file of words, the same in every session."""
    words, draw = ("to", "be", "or", "not", "that", "is", "the", "question"), random.Random(0)
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(draw.choice(words) for _ in range(6000)), encoding="utf-8")
    return str(path)


@pytest.fixture
def run_recipe() -> Callable[..., str]:
    """Run a benchmark in a process of its own, in which Triton does not interpret; return what it prints."""

    def run(name: str, *arguments: object) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= {"PYTHONPATH": str(RECIPES.parent), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, RECIPES / "benchmarks" / name, *map(str, arguments)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        return run.stdout

    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Recipes are whole programs: their tests may take more than two seconds."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.costly)
