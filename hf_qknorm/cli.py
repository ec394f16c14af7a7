"""The command line: `hf-qknorm demo | convert | inspect | monitor | export | card | push | schemes | families`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from hf_qknorm import __version__
from hf_qknorm.convert import convert_checkpoint, plan_conversion
from hf_qknorm.convert.calibrate import METHODS
from hf_qknorm.convert.native import export_native
from hf_qknorm.destinations import check_apart, check_files
from hf_qknorm.families import table
from hf_qknorm.files import user_path
from hf_qknorm.hub.push import check_push, push_to_hub
from hf_qknorm.scheme import SCHEMES, Scheme


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status. Errors a user can mend are told in a line, without a traceback."""
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], None] = options.command
    try:
        command(options)
    except (ValueError, OSError, ImportError) as error:
        print(f"hf-qknorm: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("hf-qknorm", description="Stable attention for pretrained language models.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="train, convert, continue, compare, plot: the whole story on a small model, without a download",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.set_defaults(command=_demo)
    add: Any = demo.add_argument
    add("--data", help="text: a file, a folder, or a Hub dataset's name; by default Python's standard library")
    add("--checkpoint", help="start from this causal language model instead of training a small Llama")
    add("--scheme", default="qk_norm_cap", choices=[name for name in SCHEMES if name != "none"])
    add("--base-steps", type=_count, default=200, help="steps of training for the small Llama")
    add("--steps", type=_count, default=60, help="steps of continued training")
    add("--rate", type=float, default=3e-4, help="learning rate of continued training")
    add("--out", default="./qknorm-demo", help="folder for plots, report and the converted checkpoint")
    add("--seed", type=int, default=0)
    convert = commands.add_parser(
        "convert", help="put a scheme on a checkpoint: a folder or a Hub name, to a new folder"
    )
    convert.set_defaults(command=_convert)
    add = convert.add_argument
    add("source", help="a folder with a checkpoint, or a name on the Hub")
    add("destination", help="a folder that is not there yet")
    add("--scheme", default="qk_norm_cap", type=_scheme, help="a preset's name, or JSON as in config.json")
    add("--calibrate", metavar="TEXT", help="text to fit the gains on: a file, a folder, or a Hub dataset's name")
    add("--method", default="fit", choices=METHODS, help="how the gains are found, with --calibrate")
    add("--max-loss-increase", type=float, metavar="NATS", help="refuse to write a conversion that lost more")
    add("--dry-run", action="store_true", help="check everything, say what would happen, and write nothing")
    add(
        "--overwrite",
        action="store_true",
        help="replace a checkpoint at the destination, where the folder holds nothing else",
    )
    add("--allow-pickle", action="store_true", help="read pytorch_model.bin where there is no safetensors")
    add("--standalone", action="store_true", help="let it carry the code that runs it without hf_qknorm")
    add("--push", metavar="REPO", help="then push it to the Hub; whether that can be done is looked at first")
    add("--private", action="store_true", default=None, help="with --push: make a private repository")
    export = commands.add_parser("export", help="write a patched checkpoint as a model that needs no plugin, if exact")
    export.set_defaults(command=_export)
    add = export.add_argument
    add("source", help="a folder with a patched checkpoint")
    add("destination", help="a folder that is not there yet")
    add(
        "--overwrite",
        action="store_true",
        help="replace a checkpoint at the destination, where the folder holds nothing else",
    )
    _add_inspect(commands)
    _add_monitor(commands)
    _add_push(commands)
    _add_card(commands)
    commands.add_parser("schemes", help="the presets").set_defaults(command=_schemes)
    commands.add_parser("families", help="the model types that can be patched").set_defaults(command=_families)
    return parser


def _add_inspect(commands: Any) -> None:
    inspect = commands.add_parser(
        "inspect",
        help="how a checkpoint's attention looks, head by head, and which scheme suits it",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    inspect.set_defaults(command=_inspect)
    add = inspect.add_argument
    add("checkpoint", metavar="CKPT", help="a folder with a checkpoint, patched or not, or a name on the Hub")
    add(
        "--texts",
        help="text like the model's own: a file, a folder, or a Hub dataset's name; Python's standard library",
    )
    add("--tokens", type=_count, default=16_384, help="how much of it to look at")
    add("--cap", type=float, help="the cap to hold logits against; by default the model's own, or 50")
    add("--out", default="./qknorm-inspect", help="folder for inspect.json and heatmap.png")


def _add_monitor(commands: Any) -> None:
    monitor = commands.add_parser(
        "monitor",
        help="draw what LogitMonitor wrote in a training: logits and entropies by layer and step",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    monitor.set_defaults(command=_monitor)
    monitor.add_argument("log", metavar="LOG", help="the JSONL file")
    monitor.add_argument("--out", default="monitor.png", help="the picture")


def _add_push(commands: Any) -> None:
    push = commands.add_parser("push", help="push a patched checkpoint to the Hub, with code, card and plots")
    push.set_defaults(command=_push)
    add = push.add_argument
    add("checkpoint", metavar="CKPT", help="a folder with a patched checkpoint")
    add("repo", metavar="REPO", help="OWNER/NAME on the Hub; NAME alone is your own")
    add("--private", action="store_true", default=None, help="make a private repository; your account's default")
    add("--revision", help="a branch that is there; the main one")
    add("--message", help="of the commit")


def _add_card(commands: Any) -> None:
    card = commands.add_parser("card", help="write the model card of a patched checkpoint, and its plots, beside it")
    card.set_defaults(command=_card)
    card.add_argument(
        "checkpoint",
        metavar="CKPT",
        help="a folder with a patched checkpoint; a README.md that is no card of ours is kept as README.original.md",
    )
    card.add_argument("--repo", metavar="REPO", help="the name that it will have on the Hub, for the card to tell")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number ≥ 1, got {text}")
    return number


def _demo(options: argparse.Namespace) -> None:
    from hf_qknorm.demo import story  # draws in matplotlib, which the other commands do not need

    story.run(story.Settings(**{key: value for key, value in vars(options).items() if key != "command"}))


def _scheme(text: str) -> Any:
    return json.loads(text) if text.lstrip().startswith("{") else text


def _convert(options: argparse.Namespace) -> None:
    if options.private and options.push is None:
        raise ValueError("--private goes with --push REPO")
    common = {"overwrite": options.overwrite, "allow_pickle": options.allow_pickle}
    method = None if options.calibrate is None else options.method
    places = (options.source, options.destination, options.scheme)
    print(plan_conversion(*places, method=method, **common))
    if options.push is not None:
        check_push(options.source, options.push, private=options.private)
    if options.dry_run:
        print("\ndry run: nothing was written")
        return
    report = convert_checkpoint(
        *places,
        calibration=options.calibrate,
        method=options.method,
        max_loss_increase=options.max_loss_increase,
        standalone=options.standalone,
        **common,
    )
    if report is not None:
        print(f"\n{report.table()}\n\n{report}")
    elif Scheme.of(options.scheme).norms:
        print("\nits gains are fresh, so that it lost part of what it knew: --calibrate TEXT keeps it")
    print(f"\nwritten: {options.destination}")
    if options.push is not None:
        print(f"pushed: {push_to_hub(options.destination, options.push, private=options.private)}")


def _push(options: argparse.Namespace) -> None:
    where = {"private": options.private, "revision": options.revision}
    print(f"pushed: {push_to_hub(options.checkpoint, options.repo, commit_message=options.message, **where)}")


def _export(options: argparse.Namespace) -> None:
    print(export_native(options.source, options.destination, overwrite=options.overwrite))


def _inspect(options: argparse.Namespace) -> None:
    from hf_qknorm.convert.inspect import inspect_checkpoint
    from hf_qknorm.convert.plots import heat_map  # brings matplotlib

    out = user_path(options.out, "--out")
    names = ("inspect.json", "heatmap.png")
    check_files(out, names, sources=[options.checkpoint, options.texts], sign=(names[0], "advice"))
    found = inspect_checkpoint(options.checkpoint, texts=options.texts, tokens=options.tokens, cap=options.cap)
    print(found.table())
    out.mkdir(parents=True, exist_ok=True)
    report, picture = (out / name for name in names)
    found.save(report)
    heat_map(found, picture)
    print(f"\nwritten: {report}, {picture}")


def _monitor(options: argparse.Namespace) -> None:
    from hf_qknorm.training.plots import draw  # brings matplotlib
    from hf_qknorm.training.record import read_log

    out = user_path(options.out, "--out")
    if out.is_dir():
        raise IsADirectoryError(f"--out {out} is a folder: give the name of a picture")
    samples = read_log(options.log)
    check_apart(out, user_path(options.log, "LOG"))
    out.parent.mkdir(parents=True, exist_ok=True)
    draw(samples, out)
    (name, head, largest), (sharp_name, sharp_head, least) = samples[-1].worst(), samples[-1].sharpest()
    print(
        f"step {samples[-1].step}: largest |logit| {largest:.4g} ({name}, head {head}), "
        f"least entropy {least:.3g} nats ({sharp_name}, head {sharp_head})\nwritten: {out}"
    )


def _card(options: argparse.Namespace) -> None:
    from hf_qknorm.hub.card import write_card  # brings Jinja, and matplotlib where there is something to draw

    print(f"written: {', '.join(map(str, write_card(options.checkpoint, repo_id=options.repo)))}")


def _schemes(options: argparse.Namespace) -> None:
    for name, scheme in SCHEMES.items():
        print(f"{name:14}{scheme}")


def _families(options: argparse.Namespace) -> None:
    print(table.text())


if __name__ == "__main__":
    sys.exit(main())
