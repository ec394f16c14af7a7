"""Values in messages, names of files, paths that users give, and progress bars."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

from hf_qknorm import Scheme, calibrate, convert_checkpoint, patch_model, push_to_hub
from hf_qknorm.families import known_families
from hf_qknorm.files import progress
from hf_qknorm.files.formatting import MOST, shorten
from hf_qknorm.files.names import SIDE_FILE
from hf_qknorm.files.paths import user_path
from qknorm_tests.tiny import tiny_model

LONG = "x" * 20_000
NESTED = {LONG + str(i): [[LONG] * 100] * 100 for i in range(100)}


def test_values_are_shortened_and_short_ones_stay():
    for value in (LONG, 10**400, 10**5000, [10**5000], NESTED, [[NESTED] * 9] * 9, torch.zeros(999)):
        assert len(shorten(value)) <= MOST + 1
    for value in ("a", 3, 1.5, None, ["a", 1], {"a": (1, 2)}, 10**39):
        assert shorten(value) == repr(value)


def patched(**options: Any) -> Any:
    return patch_model(tiny_model("llama"), "qk_norm_cap", **options)


CALLS: dict[str, Callable[[], Any]] = {
    "scheme": lambda: patch_model(tiny_model("llama"), LONG),
    "field": lambda: Scheme.from_dict({LONG: 1}),
    "value": lambda: Scheme(q=LONG),
    "number": lambda: Scheme(softcap=10**5000),
    "backend": lambda: patched(attn_implementation=LONG),
    "tower": lambda: patched(tower=LONG),
    "knee": lambda: calibrate(patched(), [torch.arange(3, 35)[None]], knee=LONG),
    "memory": lambda: convert_checkpoint("in", "out", max_memory=LONG),
    "converted": lambda: convert_checkpoint("in", "out", LONG),
    "repository": lambda: push_to_hub(patched(), LONG),
}


@pytest.mark.parametrize("name", CALLS)
def test_errors_show_no_more_than_a_part_of_a_value(name):
    with pytest.raises((ValueError, TypeError)) as error:
        CALLS[name]()
    assert len(str(error.value)) < 3_000


def test_every_file_of_a_tokenizer_is_copied():
    for name in {TOKENIZER_MAPPING_NAMES.get(model_type) for model_type in known_families()} - {None}:
        try:
            files = tokenizer_class_from_name(name).vocab_files_names or {}
        except ImportError:  # of a library that is not installed
            continue
        assert all(map(SIDE_FILE.fullmatch, files.values())), name


@pytest.mark.parametrize(
    "name", ["LICENSE", "LICENSE.md", "LICENSE-APACHE-2.0.txt", "licence_v1.1", "Notice.txt", "USE_POLICY.md"]
)
def test_licences_are_known_by_their_names(name):
    assert SIDE_FILE.fullmatch(name)
    assert not SIDE_FILE.fullmatch(f"my{name}")


def test_user_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert user_path("~/out", "dst") == tmp_path / "home" / "out"
    assert user_path("./out", "dst") == Path("out")
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "away")
    assert user_path(tmp_path / "link" / ".." / "out", "dst") == tmp_path / "far" / "out"
    assert user_path(tmp_path / "link" / "..", "dst") == tmp_path / "far"
    with pytest.raises(ValueError, match="dst is empty, which would mean the working directory"):
        user_path("", "dst")
    for wrong in (None, b"out", "a\0b", "x" * 5000):
        with pytest.raises(ValueError, match=r"dst is .{1,150}: expected the path of a folder or a file"):
            user_path(wrong, "dst")


def count(**options: float) -> None:
    for _ in progress.progress_bar(range(3), desc="counting", **options):
        pass


def test_a_pipe_gets_a_line_a_minute(capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))  # which other packages import
    count(mininterval=0)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(progress, "SECONDS_OF_A_LINE", 1e-9)
    count()
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith("counting: 3 of 3 after 00:00, about 00:00 left")
    assert "\r" not in err
