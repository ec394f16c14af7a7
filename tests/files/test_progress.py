"""Progress bars are shown in terminals and notebooks; a file or a pipe gets a line a minute."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

BAR = """
import sys
from hf_qknorm.files.progress import progress_bar
for _ in progress_bar(range(3), desc="counting", mininterval=0):
    pass
print("done")
"""
pytestmark = pytest.mark.costly


OFTEN = """
from hf_qknorm.files import progress
progress.SECONDS_OF_A_LINE = 1e-9
"""


def test_a_pipe_gets_a_line_a_minute():
    done = subprocess.run([sys.executable, "-c", BAR], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("done\n", "")
    done = subprocess.run(
        [sys.executable, "-c", OFTEN + BAR.replace(", mininterval=0", "")], capture_output=True, text=True
    )
    assert done.stdout == "done\n"
    *_, last = done.stderr.splitlines()
    assert last.startswith("counting: 3 of 3 after 00:00, about 00:00 left")
    assert "\r" not in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")
def test_a_terminal_gets_a_bar_that_is_removed():
    import pty
    import termios

    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    os.set_blocking(ours, False)
    with subprocess.Popen([sys.executable, "-c", BAR], stdout=subprocess.PIPE, stderr=theirs, text=True) as process:
        assert process.stdout.read() == "done\n"
    shown = os.read(ours, 100_000).decode()
    os.close(theirs)
    os.close(ours)
    assert "counting" in shown
    assert not shown.rpartition("\r")[0].rpartition("\r")[2].strip()  # overwritten with spaces at the end
