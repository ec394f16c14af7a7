"""What each command of `hf-qknorm` takes: numbers and schemes are checked as they are read."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from hf_qknorm.convert.calibrate import METHODS
from hf_qknorm.convert.memory import parse_size
from hf_qknorm.scheme import SCHEMES, Scheme
from hf_qknorm.version import __version__

OVERWRITE = "replace a checkpoint at the destination, where the folder holds nothing else"
MOST = 10**12  # of what is counted: tokens, steps


class Parser(argparse.ArgumentParser):
    """argparse's own, whose errors are one line, like those of the commands."""

    def error(self, message: str) -> NoReturn:
        """Print the line to stderr and exit with status 2."""
        self.exit(2, f"hf-qknorm: {' '.join(message.split())} (see {self.prog} --help)\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """argparse's own, once all that was printed is out: whoever reads it may have gone."""
        if sys.stdout is not None:
            sys.stdout.flush()
        super().exit(status, message)


def parser() -> argparse.ArgumentParser:
    """The parser of the command line; the parsed `command` is the command's name."""
    parser = Parser("hf-qknorm", description="Stable attention for pretrained language models.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_add_demo, _add_convert, _add_inspect, _add_monitor, _add_export, _add_card, _add_push):
        add(commands)
    commands.add_parser("schemes", help="the presets")
    commands.add_parser("families", help="the model types that can be patched")
    return parser


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo",
        help="train, convert, continue, compare, plot: the whole story on a small model, without a download",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = demo.add_argument
    add("--data", help="text: a file, a folder, or a Hub dataset's name; by default Python's standard library")
    add("--checkpoint", help="start from this causal language model instead of training a small Llama")
    add("--scheme", default="qk_norm_cap", choices=[name for name in SCHEMES if name != "none"])
    add("--base-steps", type=count, default=200, help="steps of training for the small Llama")
    add("--steps", type=count, default=60, help="steps of continued training")
    add("--rate", type=positive, default=3e-4, help="learning rate of continued training")
    add("--out", default="./qknorm-demo", help="folder for plots, report and the converted checkpoint")
    add("--seed", type=seed, default=0)


def _add_convert(commands: Any) -> None:
    convert = commands.add_parser(
        "convert", help="put a scheme on a checkpoint: a folder or a Hub name, to a new folder"
    )
    add = convert.add_argument
    add("source", help="a folder with a checkpoint, or a name on the Hub")
    add("destination", help="a folder that is not there yet")
    add("--scheme", default="qk_norm_cap", type=scheme, help="a preset's name, or JSON as in config.json")
    add("--calibrate", metavar="TEXT", help="text to fit the gains on: a file, a folder, or a Hub dataset's name")
    add("--method", choices=METHODS, help="how the gains are found, with --calibrate; moments, in closed form")
    knees = "how much of the vectors' length the norms keep, with --calibrate; the least that keeps the loss, unless "
    add("--knee", type=knee, metavar="auto|NUMBER", help=f"{knees}--method is given: then the scheme's")
    add("--max-loss-increase", type=finite, metavar="NATS", help="refuse to write a conversion that lost more")
    in_memory = "with --calibrate: layers that do not fit are read from the disk in each pass; by default what is free"
    add("--max-memory", type=memory, metavar="SIZE", help=f"the most memory to take, as 8GB, {in_memory}")
    add("--dry-run", action="store_true", help="check everything, say what would happen, and write nothing")
    add("--overwrite", action="store_true", help=OVERWRITE)
    add("--allow-pickle", action="store_true", help="read pytorch_model.bin where there is no safetensors")
    add("--standalone", action="store_true", help="let it carry the code that runs it without hf_qknorm")
    add("--push", metavar="REPO", help="then push it to the Hub; whether that can be done is looked at first")
    add("--private", action="store_true", default=None, help="with --push: make a private repository")


def _add_inspect(commands: Any) -> None:
    inspect = commands.add_parser(
        "inspect",
        help="how a checkpoint's attention looks, head by head, and which scheme suits it",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = inspect.add_argument
    add("checkpoint", metavar="CKPT", help="a folder with a checkpoint, patched or not, or a name on the Hub")
    add(
        "--texts",
        help="text like the model's own: a file, a folder, or a Hub dataset's name; Python's standard library",
    )
    add("--tokens", type=count, default=16_384, help="how much of it to look at")
    add("--cap", type=cap, help="the cap to hold logits against; by default the model's own, or 50")
    add("--out", default="./qknorm-inspect", help="folder for inspect.json, heatmap.png and knees.png")


def _add_monitor(commands: Any) -> None:
    monitor = commands.add_parser(
        "monitor",
        help="draw what LogitMonitor wrote in a training: logits and entropies by layer and step",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    monitor.add_argument("log", metavar="LOG", help="the JSONL file")
    monitor.add_argument("--out", default="monitor.png", help="the picture")


def _add_export(commands: Any) -> None:
    export = commands.add_parser("export", help="write a patched checkpoint as a model that needs no plugin, if exact")
    add = export.add_argument
    add("source", help="a folder with a patched checkpoint")
    add("destination", help="a folder that is not there yet")
    add("--overwrite", action="store_true", help=OVERWRITE)


def _add_card(commands: Any) -> None:
    card = commands.add_parser("card", help="write the model card of a patched checkpoint, and its plots, beside it")
    card.add_argument(
        "checkpoint",
        metavar="CKPT",
        help="a folder with a patched checkpoint; a README.md that is no card of ours is kept as README.original.md",
    )
    card.add_argument("--repo", metavar="REPO", help="the name that it will have on the Hub, for the card to tell")


def _add_push(commands: Any) -> None:
    push = commands.add_parser("push", help="push a patched checkpoint to the Hub, with code, card and plots")
    add = push.add_argument
    add("checkpoint", metavar="CKPT", help="a folder with a patched checkpoint")
    add("repo", metavar="REPO", help="OWNER/NAME on the Hub; NAME alone is your own")
    add("--private", action="store_true", default=None, help="make a private repository; your account's default")
    add("--revision", help="a branch that is there; the main one")
    add("--message", help="of the commit")


def count(text: str) -> int:
    """A whole number ≥ 1. Raises ArgumentTypeError, as all of these do, for anything else."""
    return _whole(text, 1, MOST)


def seed(text: str) -> int:
    """A whole number that seeds a generator."""
    return _whole(text, 0, 2**32 - 1)


def _whole(text: str, least: int, most: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = None
    if number is None or not least <= number <= most:
        raise argparse.ArgumentTypeError(f"expected a whole number from {least} to {most}, got {_short(text)}")
    return number


def finite(text: str) -> float:
    """A number that is neither infinite nor NaN."""
    return _number(text, math.isfinite, "a finite number")


def positive(text: str) -> float:
    """A finite number > 0."""
    return _number(text, lambda number: 0 < number < math.inf, "a finite number > 0")


def cap(text: str) -> float:
    """A cap of a size that a picture can show."""
    return _number(text, lambda number: 1e-6 <= number <= 1e6, "a number from 1e-6 to 1e6")


def knee(text: str) -> float | str:
    """A knee ≥ 0, or "auto"."""
    return text if text == "auto" else _number(text, lambda number: 0 <= number < math.inf, 'a number ≥ 0, or "auto"')


def memory(text: str) -> int:
    """A size of memory, in bytes."""
    try:
        return parse_size(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a size as 8GB, 500MiB or bytes, got {_short(text)}") from None


def _number(text: str, holds: Callable[[float], bool], expected: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not holds(number):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {_short(text)}")
    return number


def scheme(text: str) -> Scheme:
    """A preset by its name, or a scheme as JSON."""
    try:
        return Scheme.of(json.loads(text) if text.lstrip().startswith("{") else text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(
            f'expected a preset\'s name, or JSON as {{"q": "rms", "k": "rms"}}; this JSON breaks at character '
            f"{error.pos + 1}, {_short(text[error.pos :]) if error.pos < len(text) else 'its end'}: {error.msg}"
        ) from None
    except RecursionError:
        raise argparse.ArgumentTypeError("expected JSON of one level, this is nested too deeply") from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _short(text: str) -> str:
    return repr(text) if len(text) <= 40 else f"{text[:40]!r}…"
