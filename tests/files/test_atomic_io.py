"""Atomic writes: a destination holds what it held, or all that is new; files of others beside it stay."""

import os
from pathlib import Path

import pytest

from hf_qknorm.files.atomic_io import new_folder, replace_file, replace_text


def accept() -> None:
    """Accept every destination."""


def write(path: Path, text: str = "new") -> None:
    with new_folder(path, accept) as folder:
        (folder / "content").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_folder_is_made_and_replaced(tmp_path):
    (tmp_path / ".out.a1b2c3d4").mkdir()  # of another process, running or killed
    write(tmp_path / "deep" / "out")
    write(tmp_path / "out")
    write(tmp_path / "out", "newer")
    assert names(tmp_path) == [".out.a1b2c3d4", "deep", "out"]
    assert (tmp_path / "out" / "content").read_text() == "newer"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_what_was_there(error, tmp_path):
    write(tmp_path / "out", "old")
    replace_text(tmp_path / "note.md", "old")

    def stop(path: Path) -> None:
        path.write_text("half")
        (path.parent / "temporary").write_text("x")
        raise error

    with pytest.raises(error), new_folder(tmp_path / "out", accept) as folder:
        stop(folder / "content")
    with pytest.raises(error):
        replace_file(tmp_path / "note.md", stop)
    assert names(tmp_path) == ["note.md", "out"]
    assert (tmp_path / "out" / "content").read_text() == (tmp_path / "note.md").read_text() == "old"


def test_a_rename_that_fails_puts_the_old_folder_back(tmp_path, monkeypatch):
    write(tmp_path / "out", "old")
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name == "new":
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out")
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "content").read_text() == "old"


def test_the_destination_is_checked_again_before_the_rename(tmp_path):
    out = tmp_path / "out"

    def check() -> None:
        if (out / "thesis.txt").exists():
            raise FileExistsError("thesis.txt is there")

    def thesis() -> None:
        out.mkdir()
        (out / "thesis.txt").write_text("precious")

    with pytest.raises(FileExistsError, match="thesis"), new_folder(out, check):
        thesis()
    assert names(tmp_path) == ["out"]
    assert (out / "thesis.txt").read_text() == "precious"


def test_a_link_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "note.md").symlink_to(tmp_path / "precious")
    replace_text(tmp_path / "note.md", "new")
    assert (tmp_path / "precious").read_text() == "precious"
    assert (tmp_path / "note.md").read_text() == "new"


def test_written_files_have_the_usual_permissions(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    write(tmp_path / "out")
    replace_text(tmp_path / "note.md", "new")
    for made, usual in (("out", "folder"), ("out/content", "file"), ("note.md", "file")):
        assert (tmp_path / made).stat().st_mode == (tmp_path / usual).stat().st_mode
