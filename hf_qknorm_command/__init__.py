"""The command `hf-qknorm`: its exit status after errors and signals.

It is outside of the package, whose import takes seconds: `--help` and wrong arguments need none of it.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from hf_qknorm_command.parser import code_version, make_parser, one_line

SIGNALS = ("SIGTERM", "SIGHUP")  # they stop the command as Ctrl-C does, so that incomplete files are removed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status.

    1: an error that the user can fix, described in one line; 2: wrong arguments; 128 + n: signal n, with a line about
    the files that were written; 141: the output was closed. Any other exception is a bug and is raised.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller, or under pythonw
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for terminals that lack a character
    try:
        with _signals_as_interrupts():
            options = make_parser().parse_args(arguments)
            _run(options)
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python reports an error when it flushes
        return 128 + 13
    except KeyboardInterrupt as stop:
        number = signal.Signals(stop.args[0] if stop.args else signal.SIGINT)
        written = "; ".join(getattr(stop, "__notes__", ["nothing was written"]))
        sys.stderr.write(f"hf-qknorm: stopped by {number.name}: {written}\n")
        return 128 + number
    except (ValueError, OSError, ImportError) as error:
        message = str(error)
        if isinstance(error, OSError) and error.filename is not None and error.strerror:
            message = f"{error.filename}: {error.strerror}"
        sys.stderr.write(f"hf-qknorm: {one_line(message)}\n")
        return 1
    return 0


def _run(options: Namespace) -> None:
    if options.command == "doctor":
        from hf_qknorm_command import doctor  # works where the package can't be imported

        return doctor.run(code_version(), options.json)
    from hf_qknorm.commands import COMMANDS  # imports torch

    COMMANDS[options.command](options)


@contextmanager
def _signals_as_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt, with the signal's number, for signals that would end the process at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(number)

    numbers = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
    if threading.current_thread() is not threading.main_thread():
        numbers = []  # Python allows handlers in the main thread only
    numbers = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]  # nohup ignores SIGHUP
    for number in numbers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
