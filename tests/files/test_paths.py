"""Paths that users give."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_qknorm.files.paths import user_path


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
    with pytest.raises(ValueError, match=r"dst is '~nobody-at-all/x', and there is no such user"):
        user_path("~nobody-at-all/x", "dst")
