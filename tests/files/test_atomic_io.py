"""Atomic writes: files of others beside the destination stay, and leftovers of killed processes are removed."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from filelock import FileLock

from hf_qknorm.files import atomic_io
from hf_qknorm.files.atomic_io import is_leftover, new_folder, replace_file, replace_text, scratch_folder


def accept() -> None:
    """Accept every destination."""


def leftover(path: Path, *inside: str) -> Path:
    """Make the staging folder that a killed writer of `path` leaves behind."""
    folder = path.with_name(f".{path.name}.a1b2c3d4.hf_qknorm")
    folder.mkdir()
    for name in inside:
        if name == "lock":
            (folder / name).touch()
        else:
            (folder / name).mkdir()
            (folder / name / "content").write_text(name)
    return folder


def write(path: Path, text: str = "new") -> None:
    with new_folder(path, accept) as folder:
        (folder / "content").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("kind", ["link", "file", "folder", "fifo"])
def test_other_files_beside_the_destination_stay(kind, tmp_path):
    """They are not followed, waited for, or deleted, even under names that an earlier version used itself."""
    victim, out = tmp_path / "victim", tmp_path / "out"
    victim.write_text("precious")
    beside = [tmp_path / f".{name}.{end}" for name in ("out", "note.md") for end in ("lock", "partial", "old")]
    for path in beside:
        if kind == "link":
            path.symlink_to(victim)
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
            (path / "mine").write_text("precious")
        else:
            path.write_text("precious")
    before = names(tmp_path)
    write(out)
    write(out, "newer")
    replace_text(tmp_path / "note.md", "new")
    assert names(tmp_path) == sorted([*before, "out", "note.md"])
    assert victim.read_text() == "precious"
    assert all(path.read_text() == "precious" for path in [*tmp_path.rglob("mine"), *beside] if path.is_file())


@pytest.mark.parametrize("inside", [(), ("lock",), ("lock", "new"), ("new",), ("lock", "new", "old"), ("lock", "old")])
@pytest.mark.parametrize("there", [False, True])
def test_leftovers_of_killed_processes_are_removed(inside, there, tmp_path):
    out = tmp_path / "out"
    if there:
        write(out)
    if "old" in inside and there == ("new" in inside):
        pytest.skip("no process leaves this combination")
    assert is_leftover(leftover(out, *inside))
    write(out, "newer")
    assert names(tmp_path) == ["out"]
    assert (out / "content").read_text() == "newer"


def test_an_old_folder_is_restored_after_a_kill_between_the_two_renames(tmp_path):
    out = tmp_path / "out"
    leftover(out, "lock", "new", "old")
    with pytest.raises(ValueError, match="stop"), new_folder(out, accept):
        raise ValueError("stop")
    assert names(tmp_path) == ["out"]
    assert (out / "content").read_text() == "old"
    folder = leftover(out, "lock", "new", "old")
    with pytest.raises(FileExistsError, match=r"old is .*out as it was before a run that was killed: move it away"):
        write(out)
    assert (folder / "old" / "content").read_text() == "old"
    assert (out / "content").read_text() == "old"


def test_folders_that_only_look_like_leftovers_stay(tmp_path):
    out, mine = tmp_path / "out", tmp_path / "mine"
    mine.mkdir()
    (mine / "lock").write_text("precious")
    (tmp_path / ".out.a1b2c3d4.hf_qknorm").symlink_to(mine)
    for name in (".out.b1b2c3d4.hf_qknorm", ".out.hf_qknorm", ".other.a1b2c3d4.hf_qknorm"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("precious")
    linked = tmp_path / ".out.c1b2c3d4.hf_qknorm"
    linked.mkdir()
    (linked / "lock").symlink_to(mine / "lock")
    before = names(tmp_path)
    write(out)
    assert names(tmp_path) == sorted([*before, "out"])
    assert (mine / "lock").read_text() == "precious"


def test_a_folder_has_one_writer_at_a_time(tmp_path):
    out = tmp_path / "out"
    folder = leftover(out, "new")
    with FileLock(folder / "lock"):
        with pytest.raises(FileExistsError, match=r"out: another process is writing there \(in .*hf_qknorm\)"):
            write(out)
        replace_text(tmp_path / "out", "a file: the last one counts")
        assert names(tmp_path) == [folder.name, "out"]
        (tmp_path / "out").unlink()
    write(out)
    assert names(tmp_path) == ["out"]


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


def test_a_folder_is_replaced_without_a_system_call_to_exchange(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic_io, "_exchange", lambda a, b: False)
    write(tmp_path / "out")
    write(tmp_path / "out", "newer")
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "content").read_text() == "newer"


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


def test_written_files_have_the_usual_permissions(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    write(tmp_path / "out")
    replace_text(tmp_path / "note.md", "new")
    for made, usual in (("out", "folder"), ("out/content", "file"), ("note.md", "file")):
        assert (tmp_path / made).stat().st_mode == (tmp_path / usual).stat().st_mode


def test_a_scratch_folder_is_removed_when_its_block_ends(tmp_path):
    out = tmp_path / "not yet there" / "out"
    with scratch_folder(out) as folder:
        (folder / "weights").write_text("x")
        assert folder.parent.parent == tmp_path
    assert os.listdir(tmp_path) == []
    with pytest.raises(KeyboardInterrupt), scratch_folder(out):
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []
    left = tmp_path / ".out.abcdefgh.hf_qknorm"  # of a killed process
    (left / "new").mkdir(parents=True)
    with scratch_folder(tmp_path / "out"):
        assert not left.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
@pytest.mark.parametrize("mode", [0o700, 0o777], ids=["unreadable", "open"])
def test_staging_folders_of_other_users_are_left_alone(mode):
    """As in /tmp: two users write files of the same name, or one prepares a folder for the other to put in place."""
    with TemporaryDirectory() as place:
        out = Path(place, "out")
        Path(place).chmod(0o1777)
        theirs = leftover(out, "old")
        theirs.chmod(mode)
        os.seteuid(12345)
        try:
            with scratch_folder(out) as folder:
                (folder / "mine").touch()
        finally:
            os.seteuid(0)
        assert names(Path(place)) == [theirs.name]
        assert names(theirs) == ["old"]
