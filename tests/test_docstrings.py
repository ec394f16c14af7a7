"""Every public function and class has a docstring that begins with one sentence, and an example that runs."""

import doctest
import inspect
import re
from typing import Any

import pytest

import hf_qknorm as qk
from qknorm_tests.doc_examples import names

PUBLIC = [name for name in qk.__all__ if inspect.isclass(getattr(qk, name)) or inspect.isfunction(getattr(qk, name))]

NEEDS_NETWORK = ("push_to_hub",)  # these may skip steps of their examples


def first_line_problem(docstring: str | None) -> str | None:
    """Why a docstring does not begin with one sentence on a line of its own, or None."""
    first, *rest = (docstring or "").split("\n")
    if not first.strip():
        return "there is no first line"
    if not first.endswith("."):
        return f"the first line does not end with a full stop: {first!r}"
    if re.search(r"[.!?] +[A-Z]", first):
        return f"the first line holds more than a sentence: {first!r}"
    if rest and rest[0].strip():
        return f"the first line is not followed by an empty one: {first!r}"
    return None


def examples(thing: Any, name: str) -> list[doctest.DocTest]:
    """The examples in the docstring of a function or class, and in those of the class's methods."""
    found = doctest.DocTestFinder(exclude_empty=True).find(thing, name, module=False, globs={})
    return [test for test in found if test.examples]


def run(test: doctest.DocTest) -> list[str]:
    """Run the example with the names of `doc_examples`; returns the failures, as text."""
    test.globs.update(names(test.docstring or ""))
    failures: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=failures.append)
    return failures


def test_a_docstring_begins_with_one_sentence():
    things = {name: getattr(qk, name) for name in PUBLIC}
    found = {
        name: inspect.cleandoc(vars(x).get("__doc__") or "") if inspect.isclass(x) else inspect.getdoc(x)
        for name, x in things.items()
    }
    problems = {name: first_line_problem(docstring) for name, docstring in found.items()}
    assert not {name: problem for name, problem in problems.items() if problem}


@pytest.mark.usefixtures("examples")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")  # peft uses the old name
@pytest.mark.parametrize("name", PUBLIC)
def test_a_docstring_has_an_example_that_runs(name):
    found = examples(getattr(qk, name), name)
    assert found, f"{name} has no example (>>> ...) in its docstring"
    steps = [step for test in found for step in test.examples]
    assert name in NEEDS_NETWORK or not any(doctest.SKIP in step.options for step in steps), f"{name} skips a step"
    for test in found:
        assert not run(test)
