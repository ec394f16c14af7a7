"""The table of hooks: its page, a test that fails without each, the variable that leaves them out, and installation.

What is registered in other libraries is there in whatever order they are imported.
"""

import importlib
import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import pytest
from packaging.requirements import Requirement

from hf_qknorm.hooks.install import wrap
from hf_qknorm.hooks.table import HOOKS, install_hooks
from qknorm_tests.children import child
from qknorm_tests.pages import ROOT, text_of

PAGE = text_of("hf_qknorm/hooks/README.md")
ROWS = re.findall(r"^\| `([\w.]+)` \| (.+) \| (\S+) \| `(\w+)` in `([\w/.]+)` \|$", PAGE, re.MULTILINE)
TESTS = {name: f"{file}::{test}" for name, *_, test, file in ROWS}
OPTIONAL = {"liger_kernel"}  # libraries that a test needs, and may lack

# The package without one hook, as the table is read before the package is made; then pytest. Each in a fork of its own.
WITHOUT = """
import os, sys, types, peft, pytest, transformers.modeling_utils
from importlib.machinery import PathFinder

def run(name, test):
    package = types.ModuleType("hf_qknorm")
    package.__path__ = PathFinder.find_spec("hf_qknorm").submodule_search_locations
    sys.modules["hf_qknorm"] = package
    from hf_qknorm.hooks import table
    table.HOOKS = tuple(hook for hook in table.HOOKS if hook.name != name)
    del sys.modules["hf_qknorm"]
    return pytest.main(["-q", "-n0", "-p", "no:cacheprovider", test])

for argument in sys.argv[1:]:
    process = os.fork()
    if not process:
        os.dup2(2, 1)
        sys.exit(run(*argument.split()))
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


def test_the_page_has_a_row_for_each_hook():
    assert [row[:3] for row in ROWS] == [(hook.name, hook.reason, hook.versions) for hook in HOOKS]
    assert len({hook.name for hook in HOOKS}) == len(HOOKS)


@pytest.mark.parametrize("name", TESTS)
def test_the_test_of_a_hook_exists(name):
    file, _, test = TESTS[name].partition("::")
    assert f"\ndef {test}(" in (ROOT / file).read_text()


@pytest.mark.slow
def test_the_test_of_a_hook_fails_without_it_and_passes_without_another(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    names = [name for name in TESTS if name.partition(".")[0] not in OPTIONAL or find_spec(name.partition(".")[0])]
    runs = [f"{name} {TESTS[name]}" for name in names]
    runs.append(f"yaml.Dumper {TESTS['transformers.modeling_utils.PreTrainedModel.from_pretrained']}")
    codes = dict(zip([*names, "another"], map(int, child(WITHOUT, *runs, home=tmp_path).split()), strict=True))
    assert codes == {**dict.fromkeys(names, pytest.ExitCode.TESTS_FAILED), "another": pytest.ExitCode.OK}


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.name)
def test_a_hook_fits_the_library_that_is_installed(hook):
    needed = Requirement(hook.versions)
    try:
        found = version(needed.name)
    except PackageNotFoundError:
        pytest.skip(f"needs {needed.name}")
    if needed.specifier.contains(found):
        value: Any = importlib.import_module(hook.module)
        for part in hook.changes.split("."):
            value = getattr(value, part)
        if hook.wraps:
            assert value.hf_qknorm_hook is hook.function


def test_another_value_is_refused(monkeypatch):
    monkeypatch.setenv("HF_QKNORM_HOOKS", "off")
    with pytest.raises(ValueError, match=r"^HF_QKNORM_HOOKS must be 1 \(all .* or 0 \(those .*, got 'off'$"):
        install_hooks()


class Library:
    """A library with each kind of function."""

    def plain(self, x: int) -> int:
        return x

    @classmethod
    def of_class(cls, x: int) -> int:
        return x

    @staticmethod
    def static(x: int) -> int:
        return x


def doubled(function: Any, *args: Any) -> Any:
    return 2 * function(*args)


@pytest.mark.parametrize("name", ["plain", "of_class", "static"])
def test_a_function_is_wrapped_once_and_stays_of_its_kind(name):
    module = type("Module", (), {"Library": type("Library", (Library,), {})})
    for _ in range(2):
        wrap(module, f"Library.{name}", doubled)
    assert getattr(module.Library(), name)(3) == 6
    assert getattr(Library(), name)(3) == 3
    wrap(module, "Library.absent", doubled)
    assert not hasattr(module.Library, "absent")


ORDERS = (
    "peft.utils.constants, transformers.masking_utils, hf_qknorm",
    "hf_qknorm, transformers, peft",
    "hf_qknorm.attend.masks, peft",
)
SCRIPT = """
import sys, {imports}
from importlib import reload
from transformers import AttentionInterface, AttentionMaskInterface
from peft.utils import constants
names = ("hf_qknorm", "hf_qknorm_triton", "hf_qknorm_cpu", "hf_qknorm_tiled", "hf_qknorm_eager")
print(all(name in AttentionInterface() and name in AttentionMaskInterface() for name in names))
tables = [table for name, table in vars(constants).items() if name.startswith("TRANSFORMERS_MODELS_TO_")]
print(sum("llama" in table for table in tables) > 1)
print(all(table.get("qknorm_llama") == table.get("llama") for table in tables))
print("qknorm_llama" in reload(constants).TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING)
"""
LIGER = """
from hf_qknorm.families import known_families
assert "liger_kernel" not in sys.modules
from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as table
print(all(f"qknorm_{name}" in table for name in known_families()))
"""
LEFT_OUT = """
import hf_qknorm, peft, transformers
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
functions = [PretrainedConfig.__post_init__, PreTrainedModel.from_pretrained, peft.config.PeftConfigMixin.to_dict]
print(sum(hasattr(function, "hf_qknorm_hook") for function in functions))
print("qknorm_llama" in peft.utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING)
print("qknorm_llama" in transformers.CONFIG_MAPPING, "hf_qknorm" in AttentionInterface())
"""


@pytest.mark.slow
@pytest.mark.parametrize("imports", ORDERS)
def test_tables_of_other_libraries_are_filled_in_any_order(imports, tmp_path):
    script, lines = SCRIPT.format(imports=imports), 4
    if find_spec("liger_kernel"):
        script, lines = script + LIGER, 5
    assert child(script, home=tmp_path) == "True\n" * lines


@pytest.mark.slow
def test_the_variable_leaves_what_patched_models_need(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_QKNORM_HOOKS", "0")
    assert child(LEFT_OUT, home=tmp_path) == "0\nFalse\nTrue True\n"
