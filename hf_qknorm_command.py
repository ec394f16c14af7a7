"""The command `hf-qknorm`, outside of the package: an interrupt while that is imported, for seconds, is a line too."""

from __future__ import annotations

import sys


def main() -> int:
    """`hf_qknorm.cli.main`; returns the exit status."""
    try:
        from hf_qknorm.cli import main as command
    except KeyboardInterrupt:
        sys.stderr.write("hf-qknorm: stopped by SIGINT: nothing was written\n")
        return 130
    return command()
