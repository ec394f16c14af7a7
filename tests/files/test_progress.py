"""Progress bars are shown in terminals and notebooks; a file or a pipe gets a line a minute."""

from __future__ import annotations

import os
import sys

import pytest

from hf_qknorm.files import progress


def count(**options: float) -> None:
    for _ in progress.progress_bar(range(3), desc="counting", **options):
        pass


def test_a_pipe_gets_a_line_a_minute(capfd, monkeypatch):
    count(mininterval=0)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(progress, "SECONDS_OF_A_LINE", 1e-9)
    count()
    out, err = capfd.readouterr()
    assert out == ""
    *_, last = err.splitlines()
    assert last.startswith("counting: 3 of 3 after 00:00, about 00:00 left")
    assert "\r" not in err


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")
def test_a_terminal_gets_a_bar_that_is_removed(capfd, monkeypatch):
    import pty
    import termios

    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    os.set_blocking(ours, False)
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        count(mininterval=0)
        monkeypatch.undo()
    assert capfd.readouterr() == ("", "")
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    assert "counting" in shown
    assert not shown.rpartition("\r")[0].rpartition("\r")[2].strip()  # overwritten with spaces at the end
