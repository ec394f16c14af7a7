"""Every snippet of every page is run, or checked as far as it can be without a network, a GPU or an hour."""

import argparse
import ast
import contextlib
import io
import re
import runpy
import shlex
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, NoReturn

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser
from typer.main import get_command

from hf_qknorm import SCHEMES, cli
from hf_qknorm.norms import NORMS
from qknorm_tests.doc_examples import names
from qknorm_tests.pages import NAMES, NO_RUN, ROOT, WRITTEN, Snippet, all_snippets, snippets, text_of

LANGUAGES = ("python", "bash", "text", "yaml")
ANYWHERE = ("lm_eval", "mypy", "ruff", "vllm")  # commands whose arguments are not checked
PYTHON = all_snippets(WRITTEN, "python")
SHELL = all_snippets(WRITTEN, "bash")
CARDS = all_snippets([name for name in NAMES if name.startswith("model_cards/")], "python")
SCRIPTS = [
    str(path.relative_to(ROOT))
    for folder in (ROOT / "recipes", ROOT / "recipes" / "benchmarks")
    for path in sorted(folder.glob("*.py"))
    if "__main__" in path.read_text(encoding="utf-8")
]
(README,) = [snippet for snippet in PYTHON if snippet.page == "README.md" and snippet.output]
SEED_OSS = "hf_qknorm/families/README.md"  # its snippet changes tables: tests/families/test_table.py runs it


class Parsed(BaseException):
    """The command line was parsed, and nothing else of the script is to run."""


def test_every_snippet_says_its_language():
    for snippet in (snippet for name in WRITTEN for snippet in snippets(name)):
        assert snippet.language in LANGUAGES, snippet
        assert snippet.info in LANGUAGES or NO_RUN.fullmatch(snippet.info), f"{snippet}: {snippet.info}"


def test_outputs_follow_the_code_that_prints_them():
    assert sum(snippet.output is not None for snippet in PYTHON) == len(all_snippets(WRITTEN, "text"))


def printed(snippet: Snippet) -> str:
    """The output of the snippet, run in the working directory."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(snippet.code, str(snippet), "exec"), names(snippet.code) | {"__name__": "example"})
    return out.getvalue()


@pytest.fixture
def _tables_as_before() -> Iterator[None]:
    """Take out of the tables again what a snippet adds."""
    tables = [(table, dict(table)) for table in (SCHEMES, NORMS)]
    yield
    for table, before in tables:
        table.clear()
        table.update(before)


@pytest.mark.usefixtures("examples", "_tables_as_before")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")  # peft uses the old name
@pytest.mark.parametrize("snippet", PYTHON, ids=str)
def test_python_runs_and_prints_what_the_page_shows(snippet):
    if not snippet.runs:
        compile(snippet.code, str(snippet), "exec")
        return
    if snippet.page == SEED_OSS:
        pytest.skip("tests/families/test_table.py runs it")
    text = printed(snippet)
    if snippet == README:
        assert words(text).startswith(
            "calibrated, knee #, sharpness #: loss # unpatched, # with fresh gains, # with gains"
        )
    elif snippet.output is not None:
        assert text == snippet.output


def test_python_of_the_cards_compiles():
    for snippet in CARDS:
        compile(snippet.code, str(snippet), "exec")


def shell_commands(code: str) -> list[list[str]]:
    """The commands of a snippet, as words: those on a line that "&&" or "|" joins are several."""
    commands: list[list[str]] = []
    for line in code.replace("\\\n", " ").splitlines():
        commands.append([])
        for word in shlex.split(line, comments=True):
            if word in ("&&", "|"):
                commands.append([])
            else:
                commands[-1].append(word)
    return [command for command in commands if command]


@pytest.mark.parametrize("snippet", SHELL, ids=str)
def test_shell_commands_are_understood(snippet, monkeypatch):
    found = shell_commands(snippet.code)
    assert found
    for command in found:
        check(command, monkeypatch)


@pytest.mark.parametrize("script", SCRIPTS)
def test_commands_of_a_recipes_docstring_are_understood(script, monkeypatch):
    block = re.search(r"(?:^    .*\n?)+", ast.get_docstring(ast.parse(text_of(script))) or "", re.MULTILINE)
    for command in shell_commands(textwrap.dedent(block[0]) if block else ""):
        if command[0] != "compute-sanitizer":
            check(command, monkeypatch)


def test_yaml_is_a_mapping():
    for snippet in all_snippets(WRITTEN, "yaml"):
        assert isinstance(yaml.safe_load(snippet.code), dict), snippet


def check(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise AssertionError for a command that its program would not accept."""
    program, *arguments = command
    match program:
        case "hf-qknorm":
            group = get_command(cli.app)
            name, parsed, rest = group.resolve_command(
                group.make_context("hf-qknorm", [], resilient_parsing=True), arguments
            )
            assert parsed is not None, command
            parsed.make_context(name, rest)
        case "python" if arguments[0] == "-m":
            assert find_spec(arguments[1]), command
        case "python":
            check_script(arguments[0], arguments[1:], monkeypatch)
        case "torchrun":
            launched = get_args_parser().parse_args(arguments)
            check_script(launched.training_script, launched.training_script_args, monkeypatch)
        case "accelerate":
            assert arguments[0] == "launch"
            launched = launch_command_parser().parse_args(arguments[1:])
            assert (ROOT / launched.config_file).is_file(), command
            if launched.training_script != "train.py":  # the reader's own
                check_script(launched.training_script, launched.training_script_args, monkeypatch)
        case "pip":
            check_extras(arguments)
        case "pytest":
            check_pytest(arguments)
        case _:
            assert program in ANYWHERE, f"{program}: a command that no test understands"


def check_script(script: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a script with its arguments, and end it when it has parsed them."""
    path = ROOT / script
    assert path.is_file(), script
    with parsing([script, *arguments], monkeypatch):
        sys.path[:0] = [str(path.parent), str(ROOT / "recipes")]
        runpy.run_path(str(path), run_name="__main__")


@contextlib.contextmanager
def parsing(command: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within, a program starts as by `command`; it must end itself by parsing arguments that it knows."""
    parse = argparse.ArgumentParser.parse_known_args

    def parse_alone(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> NoReturn:
        _, unknown = parse(self, args, namespace)
        assert not unknown, f"{command[0]} does not know {unknown}"
        raise Parsed

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", parse_alone)
        patch.setattr(sys, "argv", command)
        patch.setattr(sys, "path", [*sys.path])
        with pytest.raises(Parsed):
            yield


def check_extras(arguments: list[str]) -> None:
    """The extras of `pip install -e '.[test]'` are those of pyproject.toml."""
    assert arguments[0] == "install"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra in re.findall(r"\.\[(\w+)\]", " ".join(arguments)):
        assert extra in project["optional-dependencies"]


def check_pytest(arguments: list[str]) -> None:
    """Folders and files of tests exist, and options are those of tests/conftest.py."""
    options = (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8")
    for argument in arguments:
        assert not argument.startswith("tests") or (ROOT / argument).exists(), argument
        assert not argument.startswith("--") or f'"{argument}"' in options, argument


def test_recipes_that_a_page_names_exist():
    pattern = r"(?<![\w/])recipes/[\w/]+\.(?:py|ya?ml|jsonl?)\b"
    named = [(name, script) for name in NAMES for script in re.findall(pattern, text_of(name))]
    assert not [(name, script) for name, script in named if not (ROOT / script).is_file()]


def words(text: str) -> str:
    return re.sub(r"\d[\d,]*(?:\.\d+)?", "#", text)


def numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]
