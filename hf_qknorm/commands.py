"""The commands of `hf-qknorm`. `hf_qknorm_command` parses their arguments and reports their errors."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from hf_qknorm.convert.convert import convert_checkpoint
from hf_qknorm.convert.push import check_target, push_to_hub
from hf_qknorm.convert.remeasure import export_measured
from hf_qknorm.export.native import export_native
from hf_qknorm.families import table
from hf_qknorm.files.names import CARD, REPORT
from hf_qknorm.files.paths import check_writable, user_path
from hf_qknorm.scheme import SCHEMES, field_values


def _demo(options: Namespace) -> None:
    from hf_qknorm.demo.data import Settings
    from hf_qknorm.demo.run import run_demo  # imports matplotlib

    settings = Settings(**{key: value for key, value in vars(options).items() if key != "command"})
    with _reported(user_path(settings.out, "--out")):
        run_demo(settings)


def _convert(options: Namespace) -> None:
    if options.private and options.push is None:
        raise ValueError("--private goes with --push REPO")
    if options.push is not None:
        check_target(options.push)
    places = (options.source, options.destination, options.scheme)
    names = ["data", "method", "knee", "max_loss_increase", "length", "max_tokens", "max_memory"]
    names += ["standalone", "exportable", "overwrite"]
    chosen = {name: getattr(options, name) for name in names}
    convert_checkpoint(*places, **chosen, dry_run=True)  # prints the plan
    if options.dry_run:
        print("\ndry run: nothing was written")
        return
    destination = user_path(options.destination, "the destination")
    with _reported(destination):
        report = convert_checkpoint(*places, **chosen)
        if report is not None:
            print(f"\n{report.table()}\n\n{report}")
        elif options.scheme.norms:
            print("\nthe gains are fresh, and the model has lost part of what it learned: --data TEXT keeps it")
        print(f"\nwritten: {destination}\n\n{_loading(destination, options.standalone)}")
        if options.push is not None:
            _push_folder(destination, options.push, private=options.private)


def _loading(folder: Path, standalone: bool) -> str:
    """The lines that load a checkpoint, with hf_qknorm and without."""
    from hf_qknorm.checkpoint import read_config
    from hf_qknorm.convert.card import auto_class

    model = f"{auto_class(read_config(folder))}.from_pretrained({str(folder)!r}"
    lines = [f"with hf_qknorm:    import hf_qknorm; model = {model})"]
    if standalone:
        lines.append(f"without hf_qknorm: model = {model}, trust_remote_code=True)")
    return "\n".join(["load it", *lines])


def _push(options: Namespace) -> None:
    where = {"private": options.private, "revision": options.revision, "dry_run": options.dry_run}
    _push_folder(options.checkpoint, options.repo, commit_message=options.message, **where)


def _export(options: Namespace) -> None:
    if options.texts is None:
        for name in ("max_loss_increase", "length"):
            if getattr(options, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} is for a measurement: give --texts TEXT as well")
    measured = {name: getattr(options, name) for name in ("tokens", "length")}
    places, overwrite = (options.source, options.destination), options.overwrite
    with _reported(user_path(options.destination, "the destination")):
        if options.texts is None:
            print(export_native(*places, overwrite=overwrite))
        else:
            limit = options.max_loss_increase
            print(export_measured(*places, options.texts, max_loss_increase=limit, overwrite=overwrite, **measured))


def _inspect(options: Namespace) -> None:
    from hf_qknorm.inspection.inspect import inspect_checkpoint
    from hf_qknorm.inspection.plots import heat_map, knee_curve  # imports matplotlib

    out = user_path(options.out, "--out")
    names = ("inspect.json", "heatmap.png", "knees.png")
    numbers, picture, curve = files = tuple(out / name for name in names)
    check_writable(*files)
    with _reported(*files):
        measured = {name: getattr(options, name) for name in ("texts", "tokens", "length", "cap")}
        found = inspect_checkpoint(options.checkpoint, **measured)
        print(found.table())
        out.mkdir(parents=True, exist_ok=True)
        found.save(numbers)
        heat_map(found, picture)
        if found.knees is None:
            curve.unlink(missing_ok=True)  # of an earlier inspection
        else:
            knee_curve(found, curve)
    print(f"\nwritten: {', '.join(str(path) for path in files if path.exists())}")


def _monitor(options: Namespace) -> None:
    from hf_qknorm.training.logit_log import read_log
    from hf_qknorm.training.logit_plots import draw_log  # imports matplotlib

    out = user_path(options.out, "--out")
    check_writable(out)
    with _reported(out):
        samples = read_log(options.log)
        if not samples:
            raise ValueError(f"{options.log}: the log holds no sample yet")
        if out.exists() and out.samefile(user_path(options.log, "LOG")):
            raise FileExistsError(f"{out} is the log itself: give another file")
        out.parent.mkdir(parents=True, exist_ok=True)
        draw_log(samples, out)
    (name, head, largest), (sharp_name, sharp_head, least) = samples[-1].worst(), samples[-1].sharpest()
    print(
        f"step {samples[-1].step}: largest |logit| {largest:.4g} ({name}, head {head}), "
        f"least entropy {least:.3g} nats ({sharp_name}, head {sharp_head})\nwritten: {out}"
    )


def _card(options: Namespace) -> None:
    from hf_qknorm.convert.card import render_card, write_card

    if options.length is not None and options.texts is None:
        raise ValueError("--length is for a measurement: give --texts TEXT as well")
    folder = user_path(options.checkpoint, "the checkpoint")
    files = [folder / name for name in ([] if options.texts is None else [REPORT]) + [CARD]]
    check_writable(*files)
    with _reported(*files):
        if options.texts is not None:
            from hf_qknorm.convert.remeasure import remeasure_checkpoint

            render_card(folder, repo_id=options.repo)  # raises before the measurement, which may take long
            report = remeasure_checkpoint(folder, options.texts, tokens=options.tokens, length=options.length)
            print(f"{report.table()}\n")
        print(f"written: {', '.join(map(str, write_card(options.checkpoint, repo_id=options.repo)))}")


def _schemes(options: Namespace) -> None:
    for name, scheme in SCHEMES.items():
        print(f"{name:14}{scheme}")
    print('\nor fields, which all have a default, as JSON: \'{"q": "rms", "k": "rms", "softcap": 30}\'\n')
    for name, values in field_values().items():
        print(f"{name:14}{values}")


def _families(options: Namespace) -> None:
    print(table.text())


COMMANDS: Final[dict[str, Callable[[Namespace], None]]] = {
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


@contextmanager
def _reported(*paths: Path) -> Iterator[None]:
    """Add to an interrupt which of these files and folders, each written whole or not at all, have been written."""
    before = {path: _identity(path) for path in paths}
    try:
        yield
    except KeyboardInterrupt as stop:
        written = [str(path) for path in paths if _identity(path) != before[path]]
        kept = [str(path) for path in paths if str(path) not in written and before[path] is not None]
        note = f"written whole: {', '.join(written)}" if written else "nothing was written"
        stop.add_note(f"{note}; as before: {', '.join(kept)}" if kept else note)
        raise


def _identity(path: Path) -> tuple[int, int] | None:
    found = path.lstat() if os.path.lexists(path) else None
    return found and (found.st_ino, found.st_mtime_ns)


def _push_folder(folder: str | Path, repo: str, **options: Any) -> None:
    try:
        url = push_to_hub(folder, repo, **options)
        print("dry run: nothing was sent" if url is None else f"pushed: {url}")
    except KeyboardInterrupt as stop:
        stop.add_note(f"{repo} gets the whole commit or nothing of it; push again to go on")
        raise
