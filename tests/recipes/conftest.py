"""The recipes are scripts, not a package: the tests import them from their folders."""

from __future__ import annotations

import random
import sys
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Recipes are whole programs: their tests may take more than two seconds."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.costly)
