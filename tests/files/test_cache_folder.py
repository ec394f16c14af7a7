"""Who may write to the cache folder, its parents and its files."""

from __future__ import annotations

import errno
import grp
import os
import pwd
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_qknorm.files import cache_folder
from hf_qknorm.files.cache_folder import UntrustedError, folder, make_folder, open_file, store_text

OTHER = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make another user the owner")


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The value of XDG_CACHE_HOME."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "base"))
    forget()
    yield tmp_path / "base"
    forget()


def forget() -> None:
    cache_folder._is_alone_in.cache_clear()
    cache_folder._unmapped_owners.cache_clear()


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o2755])
def test_a_folder_of_this_user_is_trusted(mode, base):
    made = make_folder()
    made.chmod(mode)
    assert folder() == make_folder() == made == base / "hf_qknorm"
    assert made.stat().st_mode & 0o7777 == mode


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757, 0o720, 0o1777])
def test_a_folder_that_others_may_write_to_is_refused(mode):
    made = make_folder()
    made.chmod(mode)
    for ask in (folder, make_folder):
        with pytest.raises(
            UntrustedError, match=rf"{made} has mode {mode:04o}, .*: run `chmod go-w {made}`, or set XDG"
        ):
            ask()


@needs_root
@pytest.mark.parametrize("place", ["hf_qknorm", "."])
def test_a_folder_of_another_user_is_refused(place, base):
    make_folder()
    os.chown(base / place, OTHER, -1)
    with pytest.raises(
        UntrustedError, match=f"{base / place} belongs to the user {OTHER}, not to 0, .*: set XDG_CACHE"
    ):
        folder()


@needs_root
def test_a_folder_that_root_prepared_is_trusted(base, monkeypatch):
    store_text(make_folder() / "x", "content")
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    with open_file(folder() / "x") as file:
        assert file.read() == b"content"


def test_a_folder_that_is_not_writable_is_refused_with_the_way_out(monkeypatch):
    made = make_folder()
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    assert folder() == made
    with pytest.raises(
        PermissionError, match=f"{made} may not be written to: set XDG_CACHE_HOME to a folder of your own"
    ):
        make_folder()


def test_a_folder_that_can_not_be_made_is_reported_with_the_way_out(base, monkeypatch):
    def refuse(path: Path, **_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(
        PermissionError, match=rf"^{base}/hf_qknorm can't be made \(Read-only file system\): set XDG_CACHE_HOME to"
    ):
        make_folder()


@pytest.mark.parametrize(("mode", "trusted"), [(0o1777, True), (0o1775, True), (0o777, False), (0o757, False)])
def test_a_parent_in_which_others_may_rename_is_refused_unless_it_is_sticky(mode, trusted, base):
    base.mkdir()
    base.chmod(mode)
    if trusted:
        assert make_folder() == base / "hf_qknorm"
    else:
        with pytest.raises(UntrustedError, match=f"{base} has mode {mode:04o}"):
            make_folder()
        assert not (base / "hf_qknorm").exists()


USERS = {"alone": ["me"], "of others too": ["me", "you"], "unknown": []}


@pytest.mark.parametrize("users", USERS)
@pytest.mark.parametrize("member", [None, "me", "you"])
def test_a_parent_may_be_open_to_a_group_of_this_user_alone(users, member, base, monkeypatch):
    """As with a umask of 002."""
    base.mkdir()
    base.chmod(0o775)
    known = [SimpleNamespace(pw_name=name, pw_gid=base.stat().st_gid) for name in USERS[users]]
    monkeypatch.setattr(pwd, "getpwall", lambda: [*known, SimpleNamespace(pw_name="they", pw_gid=-1)])
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_name="me"))
    monkeypatch.setattr(grp, "getgrgid", lambda _: SimpleNamespace(gr_mem=[member] if member else []))
    if {*USERS[users], *([member] if member else [])} == {"me"}:
        assert folder() == base / "hf_qknorm"
    else:
        with pytest.raises(UntrustedError, match=f"{base} has mode 0775"):
            folder()


@needs_root
def test_links_are_resolved_before_the_check(base, tmp_path):
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", OTHER, -1)
    base.symlink_to(tmp_path / "theirs")
    with pytest.raises(UntrustedError, match=f"{tmp_path}/theirs belongs to the user {OTHER}"):
        make_folder()
    base.unlink()
    (tmp_path / "mine").mkdir()
    base.symlink_to(tmp_path / "mine")
    assert make_folder() == tmp_path / "mine" / "hf_qknorm"


@pytest.mark.parametrize("value", ["cache", "~/cache", "./x"])
def test_a_relative_folder_is_refused(value, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    with pytest.raises(
        UntrustedError, match=f"{Path(value)}/hf_qknorm depends on the working directory: set XDG_CACHE_H"
    ):
        make_folder()
    assert not list(tmp_path.iterdir())


def test_the_default_is_in_the_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder() == tmp_path / ".cache" / "hf_qknorm"
    monkeypatch.setenv("HOME", "here")
    with pytest.raises(UntrustedError, match="here/.cache/hf_qknorm depends on the working directory"):
        folder()


@needs_root
@pytest.mark.parametrize(("mapped", "trusted"), [("1000 1000 1", True), ("0 0 4294967295", False), ("0 1000 1", False)])
def test_a_namespace_without_root_shows_roots_parents_as_of_another(mapped, trusted, base, monkeypatch, tmp_path):
    (tmp_path / "map").write_text(f"{mapped}\n")
    (tmp_path / "overflow").write_text(f"{OTHER}\n")
    monkeypatch.setattr(cache_folder, "_UID_MAP", tmp_path / "map")
    monkeypatch.setattr(cache_folder, "_OVERFLOW_UID", tmp_path / "overflow")
    made = make_folder()
    os.chown(base, OTHER, -1)
    forget()
    if trusted:
        assert folder() == made
        os.chown(made, OTHER, -1)
    with pytest.raises(UntrustedError, match=f"belongs to the user {OTHER}"):
        folder()


def test_a_file_is_not_a_link_nor_open_to_others(tmp_path):
    path = make_folder() / "x"
    store_text(path, "content")
    with open_file(path) as file:
        assert file.read() == b"content"
    path.chmod(0o664)
    with pytest.raises(UntrustedError, match=f"{path} has mode 0664"):
        open_file(path)
    store_text(path, "content")
    assert path.stat().st_mode & 0o777 == 0o644
    path.with_name("link").symlink_to(path)
    with pytest.raises(OSError, match="link"):
        open_file(path.with_name("link"))
