"""The command `hf-qknorm`. Commands import what they run in their bodies: help and wrong arguments need no torch."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import typer
from typer import Argument, BadParameter, Option, echo

from hf_qknorm import install_hooks
from hf_qknorm.scheme import SCHEMES, Scheme, field_values
from hf_qknorm.version import __version__

app = typer.Typer(help="Stable attention for pretrained language models.", rich_markup_mode=None)


def parse_scheme(text: str) -> Scheme:
    """A `Scheme` from a preset's name, or from JSON. Raises BadParameter for anything else."""
    try:
        return Scheme.of(json.loads(text) if text.lstrip().startswith("{") else text)
    except (ValueError, RecursionError) as error:
        raise BadParameter(f'{error}; expected a preset, or JSON as {{"q": "rms", "k": "rms"}}') from None


Checkpoint = Annotated[str, Argument(metavar="CKPT", help="A folder with a checkpoint, or a name on the Hub.")]
Patched = Annotated[str, Argument(metavar="CKPT", help="A folder with a patched checkpoint.")]
Folder = Annotated[str, Argument(metavar="DST", help="A new folder.")]
SchemeOption = Annotated[Any, Option(parser=parse_scheme, metavar="SCHEME", help="A preset, or JSON of its fields.")]
Data = Annotated[str | None, Option(metavar="TEXT", help="Text: a file or a folder.")]
DataOrLibrary = Annotated[str | None, Option(metavar="TEXT", help="A file or a folder; else Python's library.")]
MaxTokens = Annotated[int, Option(min=1, metavar="N", help="The most tokens of the text to use.")]
Length = Annotated[int | None, Option(min=1, metavar="N", help="Sequence length: 256, or half of learned positions.")]
Increase = Annotated[float | None, Option(metavar="NATS", help="Write nothing if the loss rises by more.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace a folder that holds a checkpoint and nothing else.")]
Out = Annotated[str, Option(metavar="FOLDER", help="The folder for results.")]


class Command(typer.core.TyperCommand):
    """A command that patched models are used in: before it runs, transformers learns to load them."""

    def invoke(self, context: Any) -> Any:
        install_hooks()
        return super().invoke(context)


command = partial(app.command, cls=Command)


def print_version(asked: bool) -> None:
    """Print the version, and exit."""
    if asked:
        echo(__version__)
        raise typer.Exit


Version = Annotated[bool, Option("--version", is_eager=True, callback=print_version, help="Print the version.")]


@app.callback()
def _options(version: Version = False) -> None: ...


@command()
def demo(
    data: DataOrLibrary = None,
    checkpoint: Annotated[str | None, Option(metavar="CKPT", help="Start from this instead of a small Llama.")] = None,
    scheme: SchemeOption = "qk_norm_cap",
    base_steps: Annotated[int, Option(min=1, metavar="N", help="Steps of training for the small Llama.")] = 80,
    steps: Annotated[
        int | None, Option(min=1, metavar="N", help="Continued training: 80, with --checkpoint 0.")
    ] = None,
    rate: Annotated[float, Option(min=1e-12, max=1, metavar="N", help="The lower learning rate of two.")] = 1e-3,
    out: Out = "./qknorm-demo",
) -> None:
    """Train, convert, train on, compare and plot a small model.

    Downloads nothing. A --checkpoint is converted and compared, and trained on with --steps alone.
    """
    from hf_qknorm.demo import run_demo

    run_demo(data, checkpoint, scheme, base_steps=base_steps, steps=steps, rate=rate, out=out)


@command()
def inspect(
    checkpoint: Checkpoint,
    data: DataOrLibrary = None,
    max_tokens: MaxTokens = 16_384,
    length: Length = None,
    cap: Annotated[
        float | None, Option(min=1e-6, max=1e6, metavar="N", help="Compared with logits; by default its cap or 50.")
    ] = None,
    out: Out = "./qknorm-inspect",
) -> None:
    """Measure a checkpoint's attention, and advise a scheme."""
    from hf_qknorm.files.paths import check_writable, user_path
    from hf_qknorm.inspection.inspect import inspect_checkpoint
    from hf_qknorm.plots import draw_inspection

    folder = user_path(out, "--out")
    numbers, picture = folder / "inspect.json", folder / "inspect.png"
    check_writable(numbers, picture)
    found = inspect_checkpoint(checkpoint, data=data, max_tokens=max_tokens, length=length, cap=cap)
    found.save(numbers)
    draw_inspection(found, picture)
    echo(f"{found}\n\nwritten: {numbers}, {picture}")


@command()
def convert(
    source: Checkpoint,
    destination: Folder,
    scheme: SchemeOption = "qk_norm_cap",
    data: Data = None,
    knee: Annotated[float | None, Option(min=0, metavar="N", help="By default the least that costs little.")] = None,
    exportable: Annotated[bool, Option("--exportable", help="Choose a knee that `export` keeps.")] = False,
    max_loss_increase: Increase = None,
    length: Length = None,
    max_tokens: MaxTokens = 262_144,
    max_memory: Annotated[str | None, Option(metavar="SIZE", help="As 8GB; layers beyond it stay on the disk.")] = None,
    standalone: Annotated[bool, Option(help="Include the code that runs the model without hf_qknorm.")] = True,
    overwrite: Overwrite = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Check everything, print the plan, write nothing.")] = False,
) -> None:
    """Convert a checkpoint to a scheme, into a new folder. With --data it keeps what the model knew."""
    from hf_qknorm import convert_checkpoint

    options: dict[str, Any] = {"data": data, "max_tokens": None if data is None else max_tokens, "dry_run": dry_run}
    options |= {"knee": knee, "length": length, "max_loss_increase": max_loss_increase, "max_memory": max_memory}
    options |= {"exportable": exportable, "standalone": standalone, "overwrite": overwrite}
    report = convert_checkpoint(source, destination, scheme, **options)
    if dry_run:
        echo("\ndry run: nothing was written")
        return
    if report is not None:
        echo(f"{report.table()}\n")
    elif scheme.norms:
        echo("the gains are fresh, and the model has lost part of what it learned: --data TEXT keeps it\n")
    echo(f"written: {destination}")
    echo(f"load it with `import hf_qknorm`{' or trust_remote_code=True' if standalone else ''}, by from_pretrained")


@command()
def export(
    source: Patched,
    destination: Folder,
    data: Data = None,
    max_tokens: MaxTokens = 16_384,
    length: Length = None,
    max_loss_increase: Increase = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a patched checkpoint as a plain model of transformers.

    It computes the same. With --data norms that still act are taken off, and the loss before and after is logged.
    """
    from hf_qknorm import export_native

    limits: dict[str, Any] = {"length": length, "max_loss_increase": max_loss_increase, "max_tokens": max_tokens}
    echo(export_native(source, destination, data=data, overwrite=overwrite, **limits))


@command()
def card(
    checkpoint: Patched,
    repo: Annotated[str | None, Option(metavar="REPO", help="The checkpoint's name on the Hub.")] = None,
) -> None:
    """Write the model card of a patched checkpoint.

    Card and plot are made from the checkpoint's config and the report of its conversion.
    """
    from hf_qknorm.convert.card import write_card

    echo(f"written: {', '.join(map(str, write_card(checkpoint, repo_id=repo)))}")


@command()
def push(
    checkpoint: Patched,
    repo: Annotated[str, Argument(metavar="REPO", help="OWNER/NAME on the Hub, or NAME for your own account.")],
    private: Annotated[bool | None, Option("--private", help="Make a private repository.")] = None,
    revision: Annotated[str | None, Option(help="An existing branch.")] = None,
    message: Annotated[str | None, Option(help="The commit message.")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Check everything, list the files, upload nothing.")] = False,
) -> None:
    """Push a patched checkpoint to the Hub, with code and card."""
    from hf_qknorm import push_to_hub

    where: dict[str, Any] = {"private": private, "revision": revision, "commit_message": message, "dry_run": dry_run}
    url = push_to_hub(checkpoint, repo, **where)
    echo("\ndry run: nothing was uploaded" if dry_run else f"pushed: {url}")


@command()
def monitor(
    log: Annotated[str, Argument(metavar="LOG", help="The JSONL file of a LogitMonitor.")],
    out: Annotated[str, Option(metavar="PNG", help="The picture.")] = "monitor.png",
) -> None:
    """Draw the log of a LogitMonitor by layer and step."""
    from hf_qknorm.files.paths import check_writable, user_path
    from hf_qknorm.plots import draw_log
    from hf_qknorm.reports.logit_log import read_log

    picture = user_path(out, "--out")
    check_writable(picture)
    if os.path.realpath(picture) == os.path.realpath(os.path.expanduser(log)):
        raise FileExistsError(f"{out} is the log itself: give another picture")
    samples = read_log(log)
    if not samples:
        raise ValueError(f"{log}: the log holds no sample yet")
    draw_log(samples, picture)
    echo(f"{samples[-1]}\nwritten: {picture}")


@app.command()
def doctor() -> None:
    """Check versions, devices, and the attention's numbers."""
    from hf_qknorm.doctor import examine

    problems = []
    for finding in examine():
        echo(str(finding))
        problems += [finding.topic] if finding.level == "problem" else []
    if problems:
        raise ValueError(f"the doctor found problems with {', '.join(problems)}")


@command()
def families() -> None:
    """List the model types that can be patched."""
    from hf_qknorm.families import table

    echo(table.text())


@app.command()
def schemes() -> None:
    """List the presets, and the fields of a scheme."""
    example = 'or fields, which all have a default, as JSON: \'{"q": "rms", "k": "rms", "softcap": 30}\''
    presets, fields = ("\n".join(f"{name:14}{x}" for name, x in table.items()) for table in (SCHEMES, field_values()))
    echo(f"{presets}\n\n{example}\n\n{fields}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status.

    1: an error that the user can fix, in one line. 2: wrong arguments. 130: stopped by Ctrl-C or SIGTERM, incomplete
    files removed. Any other exception is a bug and is raised.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # whose encoding may lack → and ∞, as Windows' own does
            stream.reconfigure(errors="replace")
    try:
        status = app(args=arguments, prog_name="hf-qknorm", standalone_mode=False)
    except (ValueError, OSError, ImportError) as error:
        name, reason = getattr(error, "filename", None), getattr(error, "strerror", None)
        return _fail(f"{name}: {reason}" if name and reason else str(error), 1)
    except Exception as error:
        if type(error).__name__ == "SafetensorError":  # as of a full disk; the library is not imported by then
            return _fail(str(error), 1)
        if not hasattr(error, "format_message"):  # of typer's, for wrong arguments
            raise
        place = getattr(getattr(error, "ctx", None), "command_path", "hf-qknorm")
        return _fail(f"{error.format_message()} (see {place} --help)", 2)
    return _fail("stopped; a file or folder is written whole or not at all", 130) if status == 130 else status or 0


def _fail(message: str, status: int) -> int:
    """Print the message in one line, of a long one the beginning; return the status."""
    message = " ".join(message.split())  # the list of model types has 2300 characters
    echo(f"hf-qknorm: {message if len(message) <= 4_000 else f'{message[:4_000]} …'}", err=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
