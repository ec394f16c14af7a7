"""What is compared is what is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_qknorm.ops.cpu import library_file


def test_a_library_that_is_replaced_meanwhile_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, other, loaded = tmp_path / "a.so", tmp_path / "b.so", []
    library_file.store_library(library, lambda new: new.write_bytes(b"compared"))
    other.write_bytes(b"another")
    monkeypatch.setattr(library_file, "mark_used", lambda _: other.replace(library))
    monkeypatch.setattr(library_file, "CDLL", lambda path: loaded.append(Path(path).read_bytes()))
    library_file.load(library)
    assert loaded == [b"compared"]
    assert (
        library_file.why_unsound(library)
        == f"{library} is damaged: its size or digest differs from {tmp_path}/a.sha256"
    )


def test_a_build_that_fails_leaves_the_library(tmp_path: Path) -> None:
    library = tmp_path / "a.so"
    library_file.store_library(library, lambda new: new.write_bytes(b"first"))
    with pytest.raises(FileNotFoundError):  # the compiler wrote nothing
        library_file.store_library(library, lambda new: None)
    assert library_file.why_unsound(library) is None
    with pytest.raises(OSError, match=f"{library} does not load: "):
        library_file.load(library)
