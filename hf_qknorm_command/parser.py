"""The parser of the command line of `hf-qknorm`. It imports nothing of the package, whose import takes seconds."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import Any, NoReturn

from hf_qknorm_command.completion import PrintCompletion
from hf_qknorm_command.values import (
    CAP,
    COUNT,
    FINITE,
    POSITIVE,
    SEED,
    parse_knee,
    parse_method,
    parse_preset,
    parse_scheme,
)

LENGTHS = "the length of the sequences that the text is cut into, by default 256, or half of learned positions"
LONGEST = 4_000  # characters of an error; the list of all model types has 2300
OVERWRITE = "replace a checkpoint at the destination, if the folder holds nothing else"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, as the commands' errors are."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"hf-qknorm: {one_line(message)} (see {self.prog} --help)\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        sys.stdout.flush()  # raises BrokenPipeError here if the reader has closed the output
        super().exit(status, message)


class _Version(argparse.Action):
    """Print the version of the code, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        sys.stdout.write(f"{code_version()}\n")
        parser.exit()


def one_line(message: str) -> str:
    """The message in one line. Of a long one, as with a path or a command of thousands of characters, both ends."""
    line = " ".join(message.split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} … {line[-LONGEST // 2 :]}"


def code_version() -> str:
    """The version of the code that runs; the metadata of an editable install may be older."""
    version: str = runpy.run_path(str(Path(__file__).parents[1] / "hf_qknorm" / "version.py"))["__version__"]
    return version


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line; the result's `command` is the command's name."""
    parser = _Parser("hf-qknorm", description="Stable attention for pretrained language models.")
    parser.add_argument(
        "--version", action=_Version, nargs=0, default=argparse.SUPPRESS, help="print the version and exit"
    )
    scripts = "print the script that completes arguments in bash, zsh, fish or another shell, and exit (needs shtab)"
    parser.add_argument(
        "--print-completion", action=PrintCompletion, metavar="SHELL", default=argparse.SUPPRESS, help=scripts
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add_command in (_add_demo, _add_convert, _add_inspect, _add_monitor, _add_export, _add_card, _add_push):
        add_command(commands)
    commands.add_parser("schemes", help="list the presets, and the fields of a scheme")
    commands.add_parser("families", help="list the model types that can be patched")
    about = "check this machine: versions, devices, which attention runs and whether its numbers are right"
    doctor = commands.add_parser("doctor", help=about, description=f"{about}; 1 is the exit status after a problem.")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser


def _add_demo(commands: Any) -> None:
    about = "convert a small model, or --checkpoint; compare, train on at two rates, plot; downloads nothing"
    add = commands.add_parser("demo", help=about).add_argument
    text = "text: a file, a folder, or the name of a Hub dataset; by default Python's standard library"
    add("--data", metavar="TEXT", help=text)
    add("--checkpoint", metavar="CKPT", help="a causal language model to start from, instead of training a small Llama")
    schemes = "one of `hf-qknorm schemes`, by default %(default)s"
    add("--scheme", default="qk_norm_cap", type=parse_preset, metavar="PRESET", help=schemes)
    add("--base-steps", type=COUNT, default=120, help="steps of training for the small Llama, by default %(default)s")
    add("--steps", type=COUNT, help="steps of continued training, by default 200; none with --checkpoint")
    rate = "the usual learning rate of continued training, by default %(default)s; the demo also trains at ten times it"
    add("--rate", type=POSITIVE, default=1e-3, help=rate)
    files = "folder for results, by default %(default)s"
    add("--out", metavar="FOLDER", default="./qknorm-demo", help=files)
    add("--seed", type=SEED, default=0, help="seed of weights and batches, by default %(default)s")


def _add_convert(commands: Any) -> None:
    add = commands.add_parser("convert", help="convert a checkpoint to a scheme, into a new folder").add_argument
    add("source", metavar="SRC", help="a folder with a checkpoint, or a Hub name")
    add("destination", metavar="DST", help="a new folder")
    schemes = "a preset, or JSON as in config.json, by default %(default)s"
    add("--scheme", default="qk_norm_cap", type=parse_scheme, help=schemes)
    text = "text to calibrate gains and knee on: a file, a folder, or the name of a Hub dataset"
    add("--data", metavar="TEXT", help=text)
    methods = "with --data, how gains are computed: moments (in closed form, the default) or ones"
    add("--method", type=parse_method, help=methods)
    knees = "with --data, how much of the vectors' length the norms keep: by default the least that keeps the loss"
    add("--knee", type=parse_knee, metavar="auto|NUMBER", help=f"{knees}, or with --method the scheme's")
    exact = "with --data, a knee (by default 16) whose export as a plain model has the same bits in float32"
    add("--exportable", action="store_true", help=exact)
    limit = "with --data, the largest rise in loss; a conversion that loses more is not written"
    add("--max-loss-increase", type=FINITE, metavar="NATS", help=limit)
    add("--length", type=COUNT, metavar="TOKENS", help=f"with --data, {LENGTHS}")
    add("--max-tokens", type=COUNT, help="with --data, the most tokens to use, by default 262,144")
    memory = "the most memory for weights, as 8GB: by default most of what is free; layers that do not fit"
    add("--max-memory", metavar="SIZE", help=f"{memory} are read from files in each pass")
    add("--dry-run", action="store_true", help="check everything, print the plan, and write nothing")
    add("--overwrite", action="store_true", help=OVERWRITE)
    code = "include the code that runs the model without hf_qknorm (the default)"
    add("--standalone", action=argparse.BooleanOptionalAction, default=True, help=code)
    add("--push", metavar="REPO", help="push the result to the Hub; whether that can be done is checked first")
    add("--private", action="store_true", default=None, help="with --push, make a private repository")


def _add_inspect(commands: Any) -> None:
    about = "measure a checkpoint's attention, head by head, and advise a scheme"
    add = commands.add_parser("inspect", help=about).add_argument
    add("checkpoint", metavar="CKPT", help="a folder with a checkpoint, patched or not, or a Hub name")
    text = "text like the model's own: a file, a folder, or a Hub dataset; by default Python's standard library"
    add("--texts", metavar="TEXT", help=text)
    add("--tokens", type=COUNT, default=16_384, help="how many tokens to use, by default %(default)s")
    add("--length", type=COUNT, metavar="TOKENS", help=LENGTHS)
    add("--cap", type=CAP, help="the cap to compare logits with; by default the model's own, or 50")
    files = "folder for inspect.json, heatmap.png and knees.png, by default %(default)s"
    add("--out", metavar="FOLDER", default="./qknorm-inspect", help=files)


def _add_monitor(commands: Any) -> None:
    about = "draw the log of LogitMonitor: logits and entropies by layer and step"
    add = commands.add_parser("monitor", help=about).add_argument
    add("log", metavar="LOG", help="the JSONL file")
    add("--out", metavar="PNG", default="monitor.png", help="the picture, by default %(default)s")


def _add_export(commands: Any) -> None:
    about = "write a patched checkpoint as a plain model of transformers, if one computes exactly the same"
    removed = "Norms whose removal in training is finished (a knee of infinity) are folded into the projections."
    ended = "With --texts, norms that still act are taken off too, and the loss is measured before and after."
    add = commands.add_parser("export", help=about, description=f"{about}. {removed} {ended}").add_argument
    add("source", metavar="SRC", help="a folder with a patched checkpoint")
    add("destination", metavar="DST", help="a new folder")
    add("--overwrite", action="store_true", help=OVERWRITE)
    text = "take off norms that still act, and measure the cost on this text, a file, a folder or a Hub dataset"
    add("--texts", metavar="TEXT", help=text)
    add("--tokens", type=COUNT, default=16_384, help="with --texts, how many tokens to use, by default %(default)s")
    add("--length", type=COUNT, metavar="TOKENS", help=f"with --texts, {LENGTHS}")
    limit = "with --texts, export nothing if the loss rises by more nats per token; by default it is printed alone"
    add("--max-loss-increase", type=FINITE, metavar="NATS", help=limit)


def _add_card(commands: Any) -> None:
    add = commands.add_parser("card", help="write the model card of a patched checkpoint, with plots").add_argument
    folder = "a folder with a patched checkpoint; a README.md that hf-qknorm did not write becomes README.original.md"
    add("checkpoint", metavar="CKPT", help=folder)
    text = "measure the model on this text, a file, a folder or a Hub dataset, and write the report that the card has"
    add("--texts", metavar="TEXT", help=text)
    add("--tokens", type=COUNT, default=16_384, help="with --texts, how many tokens to use, by default %(default)s")
    add("--length", type=COUNT, metavar="TOKENS", help=f"with --texts, {LENGTHS}")
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
    add("--dry-run", action="store_true", help="list the files that would be uploaded, and send nothing")
