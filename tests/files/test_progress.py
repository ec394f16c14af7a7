"""Progress bars are shown in terminals and notebooks, and not where the output is a file or a pipe."""

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
KERNEL = """
import sys
from types import ModuleType, SimpleNamespace
sys.modules["IPython"] = ModuleType("IPython")
sys.modules["IPython"].get_ipython = lambda: SimpleNamespace(config={"IPKernelApp": {}})
"""


@pytest.mark.slow
def test_a_pipe_gets_no_bar():
    done = subprocess.run([sys.executable, "-c", BAR], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_a_notebook_gets_a_bar():
    """As text without ipywidgets; tqdm's warning about that comes with its import, which transformers makes first."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", KERNEL + BAR], capture_output=True, text=True)
    assert "done" in done.stdout, done.stderr
    assert "counting" in done.stdout + done.stderr


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
