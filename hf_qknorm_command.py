"""The command `hf-qknorm`: its arguments, and its exit status after errors and signals.

It is outside of the package, whose import takes seconds: `--help` and wrong arguments need none of it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

SIGNALS = ("SIGTERM", "SIGHUP")  # they stop the command as Ctrl-C does, so that incomplete files are removed
MOST = 10**12  # tokens or steps
OVERWRITE = "replace a checkpoint at the destination, if the folder holds nothing else"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status.

    1: an error that the user can fix, described in one line; 2: wrong arguments; 128 + n: signal n, with a line about
    the files that were written; 141: the output was closed. Any other exception is a bug and is raised.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for terminals that lack a character
    try:
        with _signals_as_interrupts():
            options = parser().parse_args(arguments)
            from hf_qknorm.cli import COMMANDS  # imports torch

            COMMANDS[options.command](options)
            if sys.stdout is not None:
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
        sys.stderr.write(f"hf-qknorm: {' '.join(message.split())}\n")
        return 1
    return 0


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


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like those of the commands."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"hf-qknorm: {' '.join(message.split())} (see {self.prog} --help)\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        if sys.stdout is not None:
            sys.stdout.flush()  # raises BrokenPipeError here if the reader has closed the output
        super().exit(status, message)


class _Version(argparse.Action):
    """Print the version that is installed, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        sys.stdout.write(f"{importlib.metadata.version('hf-qknorm')}\n")
        parser.exit()


def parser() -> argparse.ArgumentParser:
    """The parser of the command line; the result's `command` is the command's name."""
    parser = _Parser("hf-qknorm", description="Stable attention for pretrained language models.")
    parser.add_argument(
        "--version", action=_Version, nargs=0, default=argparse.SUPPRESS, help="print the version and exit"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add_command in (_add_demo, _add_convert, _add_inspect, _add_monitor, _add_export, _add_card, _add_push):
        add_command(commands)
    commands.add_parser("schemes", help="list the presets")
    commands.add_parser("families", help="list the model types that can be patched")
    return parser


def _add_demo(commands: Any) -> None:
    about = "train a small model, convert it, train on, compare and plot; downloads nothing"
    add = commands.add_parser("demo", help=about).add_argument
    add("--data", help="text: a file, a folder, or the name of a Hub dataset; by default Python's standard library")
    add("--checkpoint", help="a causal language model to start from, instead of training a small Llama")
    schemes = "one of `hf-qknorm schemes`, by default %(default)s"
    add("--scheme", default="qk_norm_cap", type=_preset, metavar="PRESET", help=schemes)
    add("--base-steps", type=COUNT, default=200, help="steps of training for the small Llama, by default %(default)s")
    add("--steps", type=COUNT, default=60, help="steps of continued training, by default %(default)s")
    add("--rate", type=POSITIVE, default=3e-4, help="learning rate of continued training, by default %(default)s")
    add("--out", default="./qknorm-demo", help="folder for all that is written, by default %(default)s")
    add("--seed", type=SEED, default=0, help="seed of weights and batches, by default %(default)s")


def _add_convert(commands: Any) -> None:
    add = commands.add_parser("convert", help="convert a checkpoint to a scheme, into a new folder").add_argument
    add("source", help="a folder with a checkpoint, or a Hub name")
    add("destination", help="a new folder")
    schemes = "a preset, or JSON as in config.json, by default %(default)s"
    add("--scheme", default="qk_norm_cap", type=_scheme, help=schemes)
    text = "text to calibrate gains and knee on: a file, a folder, or the name of a Hub dataset"
    add("--calibrate", dest="calibration", metavar="TEXT", help=text)
    methods = "with --calibrate, how gains are computed: moments (in closed form, the default), fit, fit_qk or ones"
    add("--method", type=_method, help=methods)
    knees = "with --calibrate, how much of the vectors' length the norms keep: by default the least that keeps the loss"
    add("--knee", type=_knee, metavar="auto|NUMBER", help=f"{knees}, or with --method the scheme's")
    limit = "with --calibrate, the largest rise in loss; a conversion that loses more is not written"
    add("--max-loss-increase", type=FINITE, metavar="NATS", help=limit)
    memory = "with --calibrate, the most memory to use, as 8GB: by default all that is free; layers that do not fit"
    add("--max-memory", type=_memory, metavar="SIZE", help=f"{memory} are read from the disk in each pass")
    add("--dry-run", action="store_true", help="check everything, print the plan, and write nothing")
    add("--overwrite", action="store_true", help=OVERWRITE)
    add("--allow-pickle", action="store_true", help="read pytorch_model.bin if there are no safetensors")
    add("--standalone", action="store_true", help="include the code that runs the model without hf_qknorm")
    add("--push", metavar="REPO", help="push the result to the Hub; whether that can be done is checked first")
    add("--private", action="store_true", default=None, help="with --push, make a private repository")


def _add_inspect(commands: Any) -> None:
    about = "measure a checkpoint's attention, head by head, and advise a scheme"
    add = commands.add_parser("inspect", help=about).add_argument
    add("checkpoint", metavar="CKPT", help="a folder with a checkpoint, patched or not, or a Hub name")
    text = "text like the model's own: a file, a folder, or a Hub dataset; by default Python's standard library"
    add("--texts", help=text)
    add("--tokens", type=COUNT, default=16_384, help="how many tokens to use, by default %(default)s")
    add("--cap", type=CAP, help="the cap to compare logits with; by default the model's own, or 50")
    files = "folder for inspect.json, heatmap.png and knees.png, by default %(default)s"
    add("--out", default="./qknorm-inspect", help=files)


def _add_monitor(commands: Any) -> None:
    about = "draw the log of LogitMonitor: logits and entropies by layer and step"
    add = commands.add_parser("monitor", help=about).add_argument
    add("log", metavar="LOG", help="the JSONL file")
    add("--out", default="monitor.png", help="the picture, by default %(default)s")


def _add_export(commands: Any) -> None:
    about = "write a patched checkpoint as a plain model of transformers, if one computes exactly the same"
    add = commands.add_parser("export", help=about).add_argument
    add("source", help="a folder with a patched checkpoint")
    add("destination", help="a new folder")
    add("--overwrite", action="store_true", help=OVERWRITE)


def _add_card(commands: Any) -> None:
    add = commands.add_parser("card", help="write the model card of a patched checkpoint, with plots").add_argument
    folder = "a folder with a patched checkpoint; a README.md that hf-qknorm did not write becomes README.original.md"
    add("checkpoint", metavar="CKPT", help=folder)
    add("--repo", metavar="REPO", help="the checkpoint's name on the Hub, for the card")


def _add_push(commands: Any) -> None:
    about = "push a patched checkpoint to the Hub, with code, card and plots"
    add = commands.add_parser("push", help=about).add_argument
    add("checkpoint", metavar="CKPT", help="a folder with a patched checkpoint")
    add("repo", metavar="REPO", help="OWNER/NAME on the Hub, or NAME for your own account")
    private = "make a private repository; by default your account's setting"
    add("--private", action="store_true", default=None, help=private)
    add("--revision", help="an existing branch; by default the main one")
    add("--message", help="the commit message")


def _number(expected: str, holds: Callable[[float], bool], kind: type[float] = float) -> Callable[[str], float]:
    """A parser of numbers for which `holds`; it raises ArgumentTypeError for other text."""

    def parse(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            number = math.nan
        if not holds(number):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {_short(text)}")
        return number

    return parse


COUNT = _number(f"a whole number from 1 to {MOST}", lambda number: 1 <= number <= MOST, int)
SEED = _number(f"a whole number from 0 to {2**32 - 1}", lambda number: 0 <= number < 2**32, int)
FINITE = _number("a finite number", math.isfinite)
POSITIVE = _number("a finite number > 0", lambda number: 0 < number < math.inf)
CAP = _number("a number from 1e-6 to 1e6", lambda number: 1e-6 <= number <= 1e6)  # sizes that a plot can show
KNEE = _number('a number ≥ 0, or "auto"', lambda number: 0 <= number < math.inf)


def _knee(text: str) -> float | str:
    return text if text == "auto" else KNEE(text)


def _preset(text: str) -> str:
    from hf_qknorm.scheme import SCHEMES

    return _one_of([name for name in SCHEMES if name != "none"], text)


def _method(text: str) -> str:
    from hf_qknorm.convert.calibrate import METHODS

    return _one_of(METHODS, text)


def _one_of(names: Sequence[str], text: str) -> str:
    if text not in names:
        raise argparse.ArgumentTypeError(f"invalid choice: {text!r} (choose from {', '.join(names)})")
    return text


def _memory(text: str) -> int:
    from hf_qknorm.convert.memory import parse_size

    try:
        return parse_size(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a size as 8GB, 500MiB or bytes, got {_short(text)}") from None


def _scheme(text: str) -> Any:
    """A `Scheme` from a preset's name, or from JSON."""
    from hf_qknorm.scheme import Scheme

    try:
        return Scheme.of(json.loads(text) if text.lstrip().startswith("{") else text)
    except json.JSONDecodeError as error:
        rest = _short(text[error.pos :]) if error.pos < len(text) else "its end"
        raise argparse.ArgumentTypeError(
            f'expected a preset\'s name, or JSON as {{"q": "rms", "k": "rms"}}; this JSON breaks at character '
            f"{error.pos + 1}, {rest}: {error.msg}"
        ) from None
    except RecursionError:
        raise argparse.ArgumentTypeError("expected JSON of one level, this is nested too deeply") from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _short(text: str) -> str:
    return repr(text) if len(text) <= 40 else f"{text[:40]!r}…"


if __name__ == "__main__":
    sys.exit(main())
