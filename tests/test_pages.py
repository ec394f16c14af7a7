"""The pages name what exists: links and anchors, files, functions, tables, and folders in the order of imports."""

import ast
import os
import re
from functools import cache
from pathlib import Path

import pytest
import yaml
from test_layers import MODULES, imports

import hf_qknorm as qk
from qknorm_tests.pages import NAMES, PAGES, ROOT, WRITTEN, anchors, code_files, links, named_code, prose_of, text_of

ARCHITECTURE = "hf_qknorm/README.md"
REFUSALS = "hf_qknorm/convert/REFUSALS.md"
LINKS = 20  # of the README, at most
# Files of a checkpoint, a kernel or a reader, and names that are transformers' or stand in a file of a checkpoint.
FOREIGN_FILES = {
    "_ops.py", "adapter_config.json", "config.json", "metadata.json", "modeling_qknorm.py", "qk_norm_report.json",
    "train.py",
    "tokenizer_config.json",
}  # fmt: skip
FOREIGN_NAMES = {"save_pretrained", "from_pretrained", "config._attn_implementation", "attn_logit_softcapping"}


@cache
def definitions(path: Path) -> frozenset[str]:
    """The functions, methods, classes, attributes and constants that a module defines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(found)


def find(page: str, file: str) -> Path | None:
    """A file that a page names: from the repository's root, or from the page's own folder."""
    return next((path for path in (ROOT / file, (ROOT / page).parent / file) if path.is_file()), None)


def leads_somewhere(page: str, link: str) -> bool:
    """Whether a link within the repository has a file, and the file the heading."""
    path, _, anchor = link.partition("#")
    target = ((ROOT / page).parent / path if path else ROOT / page).resolve()
    if not target.exists() or not target.is_relative_to(ROOT):
        return False
    return not anchor or anchor in anchors(str(target.relative_to(ROOT)))


def test_links_lead_to_files_and_headings():
    assert not [(name, link) for name in NAMES for link in links(name) if not leads_somewhere(name, link)]


def test_files_in_backticks_exist():
    named = [(name, file) for name in WRITTEN for file in code_files(name) if file not in FOREIGN_FILES]
    assert not [(name, file) for name, file in named if not find(name, file)]


def test_functions_named_with_their_file_are_defined_there():
    named = [(name, code, file) for name in WRITTEN for code, file in named_code(name)]
    wrong = [x for x in named if (path := find(x[0], x[2])) is None or x[1] not in definitions(path)]
    assert not wrong


def test_the_architecture_page_names_code_that_exists():
    """Also the names that stand alone on this page."""
    defined = frozenset().union(*(definitions(path) for path in MODULES.values())) | set(qk.__all__) | FOREIGN_NAMES
    alone = set(re.findall(r"`([A-Za-z_.]*[_A-Z][\w.]*)`", prose_of(ARCHITECTURE)))
    names = {name for name in alone if not find(ARCHITECTURE, name)}
    assert len(names) > 25
    assert not {name for name in names - defined if not name.startswith(("q_", "k_", "v_", "qknorm_"))}


def test_the_map_lists_every_folder_in_the_order_of_imports():
    section = text_of(ARCHITECTURE).partition("## The map")[2].partition("\n## ")[0]
    rows = [re.findall(r"`(\w+)(?:/|\.py)`", line.split("|")[1]) for line in section.splitlines() if "| `" in line]
    places = {name: place for place, row in enumerate(rows) for name in row}
    parts = {name.partition(".")[0] for name in MODULES if name}
    assert sum(map(len, rows)) == len(places)
    assert set(places) == parts
    for name, path in MODULES.items():
        part = name.partition(".")[0]
        if part in places:
            for imported in {x.partition(".")[0] for x in imports(path)} & places.keys():
                assert places[part] <= places[imported], f"{part} imports {imported}"


def test_every_folder_with_a_page_is_linked_from_the_map():
    for page in (ROOT / "hf_qknorm").glob("*/README.md"):
        assert f"{page.parent.name}/README.md" in links(ARCHITECTURE)


def test_the_readme_has_few_links():
    assert len(set(links("README.md"))) <= LINKS


def test_the_readme_states_the_version_and_the_number_of_families():
    assert f"Version {qk.__version__}," in text_of("README.md")
    assert f"\n## {qk.__version__}" in text_of(".github/CHANGELOG.md")
    own = sum(family.own_norms is True for family in qk.FAMILIES.values())
    normed = f"[{len(qk.FAMILIES) - own}](hf_qknorm/families/FAMILIES.md) model types take norms"
    assert f"{normed}, {own} with norms of their own" in text_of("README.md")


def test_every_page_can_be_reached_from_the_readme():
    reached, new = set(), {"README.md"}
    while new:
        reached |= new
        targets = {((ROOT / page).parent / link.partition("#")[0]).resolve() for page in new for link in links(page)}
        new = {str(target.relative_to(ROOT)) for target in targets if target in PAGES} - reached
    assert set(WRITTEN) <= reached


def messages(path: Path) -> list[str]:
    """The strings in a module's code, with "…" for each value that is filled in."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(x.value) if isinstance(x, ast.Constant) else "…" for x in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def quoted_errors() -> list[str]:
    """What the page of refusals quotes of errors, those of transformers left out; "…" stands for anything."""
    lines = [
        line for line in text_of(REFUSALS).splitlines() if line.startswith("| ") and "transformers' own" not in line
    ]
    return [
        quoted for line in lines for quoted in re.findall(r"[\"']([^\"]{8,}?)[\"'](?=,| \||$)", line.split(" | ")[0])
    ]


def test_quoted_errors_are_in_the_code():
    strings = [text for path in MODULES.values() for text in messages(path)]
    assert len(quoted_errors()) >= 15
    for quoted in quoted_errors():
        parts = [part.strip() for part in quoted.split("…") if part.strip()]
        assert any(all(part in text for part in parts) for text in strings), quoted


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_workflows_and_issue_forms_can_be_read(path):
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.name == "ci.yml":
        assert {"run": ".ci/run"} in data["jobs"]["run"]["steps"]
    elif path.name == "publish.yml":
        assert data["jobs"]["publish"]["needs"] == "build"
    elif path.name != "config.yml":
        assert {"name", "description", "body"} <= data.keys()


def test_the_check_in_ci_names_files_that_exist():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    files = re.findall(r"\b(?:tests|recipes)/[\w/]+\.py\b", script.read_text(encoding="utf-8"))
    assert files
    for file in files:
        assert (ROOT / file).is_file(), file


def rows(page: str) -> list[str]:
    """The names in backticks that rows of the page's tables begin with."""
    return re.findall(r"^\| `([\w-]+)` \|", text_of(page), re.MULTILINE)


def test_the_tables_of_schemes_have_every_scheme():
    assert set(rows("hf_qknorm/convert/README.md")) == set(qk.SCHEMES)
    assert set(rows("README.md")) < set(qk.SCHEMES)
