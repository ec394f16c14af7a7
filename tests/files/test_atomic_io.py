"""Atomic writes: a destination holds what it held, or all that is new; files of others beside it stay."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
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

    def stop(folder: Path) -> None:
        (folder / "content").write_text("half")
        (folder.parent / "temporary").write_text("x")
        raise error

    with pytest.raises(error), new_folder(tmp_path / "out", accept) as folder:
        stop(folder)
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "content").read_text() == "old"


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


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "note.md"
    replace_text(path, "old")

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        replace_file(path, fail)
    assert names(tmp_path) == ["note.md"]
    assert path.read_text() == "old"


@pytest.mark.parametrize("file", [None, "template"])
def test_a_write_that_fails_names_its_file(file, tmp_path):
    """As the system reports a full disk, without a name, or a file that is read meanwhile."""

    def fail(temporary: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", file)

    with pytest.raises(OSError, match="No space left on device") as error:
        replace_file(tmp_path / "note.md", fail)
    assert (error.value.errno, error.value.filename) == (errno.ENOSPC, file or str(tmp_path / "note.md"))


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


WRITER = """
import sys
from pathlib import Path
from hf_qknorm.files.atomic_io import new_folder
print("started", flush=True)
for round in range(10**6):
    with new_folder(Path(sys.argv[1]), lambda: None) as folder:
        for name in ("a", "b", "c"):
            (folder / name).write_text(str(round))
"""


@pytest.mark.costly
def test_a_killed_writer_leaves_the_old_folder_the_new_one_or_between_the_renames_none(tmp_path):
    for moment in range(8):
        out = tmp_path / str(moment) / "out"
        with subprocess.Popen([sys.executable, "-c", WRITER, str(out)], stdout=subprocess.PIPE) as writer:
            writer.stdout.readline()
            time.sleep(0.011 * moment)
            writer.send_signal(signal.SIGKILL)
        if out.exists():
            assert names(out) == ["a", "b", "c"]
            assert len({(out / name).read_text() for name in names(out)}) == 1
