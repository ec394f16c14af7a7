"""The command line: `hf-qknorm demo | convert | inspect | monitor | export | card | push | schemes | families`."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from hf_qknorm.arguments import parser
from hf_qknorm.checkpoint.destinations import check_apart, check_files
from hf_qknorm.convert import convert_checkpoint, plan_conversion
from hf_qknorm.convert.text import check_text
from hf_qknorm.export import export_native
from hf_qknorm.families import table
from hf_qknorm.files.names import CARD
from hf_qknorm.files.paths import check_writable, user_path
from hf_qknorm.hub.push import check_push, check_target, push_to_hub
from hf_qknorm.scheme import SCHEMES

ENDINGS = ("SIGTERM", "SIGHUP")  # signals that end the process as Ctrl-C does: what is half written is taken away


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status.

    1: an error that the user can mend, told in a line; 2: arguments that make no sense; 128 + n: signal n, with a line
    that says what was kept; 141: whoever read the output has gone. Any other exception is a bug, and is raised.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may not have every character
    try:
        with _ended_by_signals():
            options = parser().parse_args(arguments)
            COMMANDS[options.command](options)
            print(end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes
        return 128 + 13
    except KeyboardInterrupt as stop:
        number = signal.Signals(stop.args[0] if stop.args else signal.SIGINT)
        kept = "; ".join(getattr(stop, "__notes__", ["nothing was written"]))
        print(f"hf-qknorm: stopped by {number.name}: {kept}", file=sys.stderr)
        return 128 + number
    except (ValueError, OSError, ImportError) as error:
        print(f"hf-qknorm: {_line(error)}", file=sys.stderr)
        return 1
    return 0


def _line(error: Exception) -> str:
    """What an error says, in one line, the file first."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Signals that would end the process at once raise KeyboardInterrupt, with their number, instead."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(number)

    numbers = [getattr(signal, name) for name in ENDINGS if hasattr(signal, name)]
    if threading.current_thread() is not threading.main_thread():
        numbers = []  # Python lets the main thread alone handle signals
    taken = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]  # nohup's ignoring stays
    for number in taken:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def _telling(kept: Callable[[], str]) -> Iterator[None]:
    """Let an interrupt say what was kept."""
    try:
        yield
    except KeyboardInterrupt as stop:
        stop.add_note(kept())
        raise


@contextmanager
def _writing(*paths: Path) -> Iterator[None]:
    """Let an interrupt say which of these files and folders, written whole or not at all, are there by then."""
    before = {path: _identity(path) for path in paths}

    def kept() -> str:
        written = [str(path) for path in paths if _identity(path) != before[path]]
        as_before = [str(path) for path in paths if str(path) not in written and before[path] is not None]
        parts = [f"written whole: {', '.join(written)}" if written else "nothing was written"]
        parts += [f"as before: {', '.join(as_before)}"] if as_before else []
        return "; ".join(parts)

    with _telling(kept):
        yield


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


@contextmanager
def _pushing(repo: str) -> Iterator[None]:
    with _telling(lambda: f"{repo} gets the whole commit or nothing of it; push again to go on"):
        yield


def _demo(options: argparse.Namespace) -> None:
    from hf_qknorm.demo import story  # draws in matplotlib, which the other commands do not need

    settings = story.Settings(**{key: value for key, value in vars(options).items() if key != "command"})
    with _writing(user_path(settings.out, "--out")):
        story.run(settings)


def _convert(options: argparse.Namespace) -> None:
    if options.private and options.push is None:
        raise ValueError("--private goes with --push REPO")
    for name in ("method", "knee", "max_loss_increase", "max_memory"):
        if options.calibrate is None and getattr(options, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} is for a calibration: give --calibrate TEXT as well")
    if options.push is not None:
        check_target(options.push)
    if options.calibrate is not None:
        check_text(options.calibrate)
    names = ("calibration", "method", "knee", "overwrite", "allow_pickle")
    common = {name: getattr(options, name.replace("calibration", "calibrate")) for name in names}
    places = (options.source, options.destination, options.scheme)
    print(plan_conversion(*places, **common))
    if options.push is not None:
        check_push(options.source, options.push, private=options.private)
    if options.dry_run:
        print("\ndry run: nothing was written")
        return
    with _writing(user_path(options.destination, "the destination")):
        report = convert_checkpoint(
            *places,
            max_loss_increase=options.max_loss_increase,
            max_memory=options.max_memory,
            standalone=options.standalone,
            **common,
        )
        if report is not None:
            print(f"\n{report.table()}\n\n{report}")
        elif options.scheme.norms:
            print("\nits gains are fresh, so that it lost part of what it knew: --calibrate TEXT keeps it")
        print(f"\nwritten: {options.destination}")
        if options.push is not None:
            with _pushing(options.push):
                print(f"pushed: {push_to_hub(options.destination, options.push, private=options.private)}")


def _push(options: argparse.Namespace) -> None:
    where = {"private": options.private, "revision": options.revision}
    with _pushing(options.repo):
        print(f"pushed: {push_to_hub(options.checkpoint, options.repo, commit_message=options.message, **where)}")


def _export(options: argparse.Namespace) -> None:
    with _writing(user_path(options.destination, "the destination")):
        print(export_native(options.source, options.destination, overwrite=options.overwrite))


def _inspect(options: argparse.Namespace) -> None:
    from hf_qknorm.convert.inspect import inspect_checkpoint
    from hf_qknorm.convert.inspection_plots import heat_map, knee_curve  # brings matplotlib

    out = user_path(options.out, "--out")
    names = ("inspect.json", "heatmap.png", "knees.png")
    numbers, picture, curve = written = tuple(out / name for name in names)
    check_writable(*written)
    check_files(out, names, sources=[options.checkpoint, options.texts], marker=(names[0], "advice"))
    with _writing(*written):
        found = inspect_checkpoint(options.checkpoint, texts=options.texts, tokens=options.tokens, cap=options.cap)
        print(found.table())
        out.mkdir(parents=True, exist_ok=True)
        found.save(numbers)
        heat_map(found, picture)
        if found.knees is None:
            curve.unlink(missing_ok=True)  # an earlier inspection's
        else:
            knee_curve(found, curve)
    print(f"\nwritten: {', '.join(str(path) for path in written if path.exists())}")


def _monitor(options: argparse.Namespace) -> None:
    from hf_qknorm.training.logit_log import read_log
    from hf_qknorm.training.logit_plots import draw_log  # brings matplotlib

    out = user_path(options.out, "--out")
    check_writable(out)
    with _writing(out):
        samples = read_log(options.log)
        if not samples:
            raise ValueError(f"{options.log}: the log holds no sample yet")
        check_apart(out, user_path(options.log, "LOG"))
        out.parent.mkdir(parents=True, exist_ok=True)
        draw_log(samples, out)
    (name, head, largest), (sharp_name, sharp_head, least) = samples[-1].worst(), samples[-1].sharpest()
    print(
        f"step {samples[-1].step}: largest |logit| {largest:.4g} ({name}, head {head}), "
        f"least entropy {least:.3g} nats ({sharp_name}, head {sharp_head})\nwritten: {out}"
    )


def _card(options: argparse.Namespace) -> None:
    from hf_qknorm.hub.card import write_card  # brings Jinja, and matplotlib where there is something to draw

    with _writing(user_path(options.checkpoint, "the checkpoint") / CARD):
        print(f"written: {', '.join(map(str, write_card(options.checkpoint, repo_id=options.repo)))}")


def _schemes(options: argparse.Namespace) -> None:
    for name, scheme in SCHEMES.items():
        print(f"{name:14}{scheme}")


def _families(options: argparse.Namespace) -> None:
    print(table.text())


COMMANDS: Final[dict[str, Callable[[argparse.Namespace], None]]] = {
    "demo": _demo,
    "convert": _convert,
    "inspect": _inspect,
    "monitor": _monitor,
    "export": _export,
    "card": _card,
    "push": _push,
    "schemes": _schemes,
    "families": _families,
}


if __name__ == "__main__":
    sys.exit(main())
