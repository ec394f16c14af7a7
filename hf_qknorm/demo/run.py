"""`hf-qknorm demo`: train a small model, convert it, and train it on beside the unpatched one, at two rates."""

from __future__ import annotations

import copy
import logging
import shlex
import textwrap
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_qknorm.convert.card import write_card
from hf_qknorm.demo.conversion import convert, measure, reloaded, texts, without_norms
from hf_qknorm.demo.data import LOOKS, RUN_BATCH, Batches, Settings, prepare, token_count, total_work
from hf_qknorm.demo.progress import Progress, evaluation_work, format_seconds, seconds_per_token, threads
from hf_qknorm.demo.results import RUN_HEADER, WIDTH, Measured, Run, quoted, summary
from hf_qknorm.demo.training import mean_loss, one_thread, train
from hf_qknorm.files.atomic_io import new_folder
from hf_qknorm.files.destinations import check_folder
from hf_qknorm.files.names import other_files
from hf_qknorm.files.paths import user_path
from hf_qknorm.measure.text import check_text
from hf_qknorm.reports.records import to_json
from hf_qknorm.reports.report import Calibration, save_json
from hf_qknorm.scheme import Scheme

BASE_RATE = 2e-3  # of the small Llama's training
TIMES = 10  # the second pair of runs has this many times the usual rate
REPORT, PLOT, MODEL = WRITTEN = ("report.json", "loss.png", "model")


def run_demo(settings: Settings) -> dict[str, Any]:
    """Run the demo: print its progress and results, write the folder `settings.out`, and return the report.

    The folder appears once the model is converted, whole. From then on report and plot are replaced after each run, and
    when the demo is interrupted. The folder of an earlier demo is replaced. The small Llama computes with one thread,
    the model of `settings.checkpoint` with as many as torch has.

    Raises FileExistsError, before any work, if the folder has other files, the checkpoint or the text in it.
    """
    out = user_path(settings.out, "out")
    sources = [settings.checkpoint, settings.data]
    check = partial(check_folder, out, overwrite=True, sources=sources, marker=REPORT, others=_other_files)
    check()
    scheme = Scheme.of(settings.scheme)
    check_text(settings.data)
    logging.getLogger("hf_qknorm").setLevel(logging.ERROR)  # the tables say what the log would
    with one_thread() if settings.checkpoint is None else nullcontext():
        return _run(settings, scheme, out, check)


def _run(settings: Settings, scheme: Scheme, out: Path, check: Callable[[], None]) -> dict[str, Any]:
    torch.manual_seed(settings.seed)
    tokenizer, batches, base = prepare(settings, scheme)
    total = total_work(batches, trains_base=settings.checkpoint is None)
    _print_start(settings, seconds_per_token(base, batches["calibration"][0][:RUN_BATCH]) * total)
    with closing(Progress(total)) as progress:
        if settings.checkpoint is None:
            _train_base(base, batches, progress)
        models, conversion, calibration = convert(base, scheme, batches, progress)
        runs: list[Run] = []
        report: dict[str, Any] = {
            "scheme": scheme.to_dict(),
            "settings": vars(settings),
            "parameters": sum(p.numel() for p in base.parameters()),
            "conversion": {name: asdict(each) for name, each in conversion.items()},
            "calibration": calibration.to_dict(),
            "texts": texts(models, tokenizer, batches["held_out"][0]),
            "removed": without_norms(models["calibrated"], batches["held_out"]),
            "runs": [],
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }
        with new_folder(out, check) as folder:
            models["calibrated"].eval().save_pretrained(folder / MODEL)  # with the record of its calibration
            tokenizer.save_pretrained(folder / MODEL)
            write_card(folder / MODEL)
            report["reloaded"] = reloaded(models["calibrated"], batches["held_out"][0], folder / MODEL)
            _write(report, conversion, runs, folder)
        _print_saved(report, calibration, replace(settings, out=str(out)), progress)
        try:
            if settings.continued_steps:
                _train_on(models, batches, settings, runs, progress, lambda: _write(report, conversion, runs, out))
        except BaseException:
            _write(report, conversion, runs, out)
            if runs and runs[-1].steps < settings.continued_steps:
                progress.print(runs[-1].row(settings.continued_steps))
            raise
    _print_end(runs, settings, out)
    return report


def _other_files(folder: Path) -> list[str]:
    """The files and folders that no demo writes."""
    found = [item.name for item in sorted(folder.iterdir()) if item.name not in WRITTEN]
    return found + ([f"{MODEL}/{name}" for name in other_files(folder / MODEL)] if (folder / MODEL).is_dir() else [])


def _train_base(base: Any, batches: Batches, progress: Progress) -> None:
    progress.stage("training a small Llama")
    count, tokens = sum(p.numel() for p in base.parameters()), batches["base"][0].numel()
    each_step = lambda step: progress.advance(tokens if step else 0)  # noqa: E731
    train(base, batches["base"], rate=BASE_RATE, warmup=20, decay=True, desc=None, each_step=each_step)
    loss = mean_loss(base, batches["held_out"])
    steps = len(batches["base"])
    progress.print(f"trained: a Llama of {count / 1e6:.1f} million parameters: loss {loss:.3f} after {steps} steps\n")


def _train_on(
    models: dict[str, Any],
    batches: Batches,
    settings: Settings,
    runs: list[Run],
    progress: Progress,
    write: Callable[[], None],
) -> None:
    """Train a copy of each model at each rate, on the same batches, and call `write` after each; adds to `runs`."""
    every, tokens = max(settings.continued_steps // LOOKS, 1), batches["continued"][0].numel()
    evaluated = evaluation_work(token_count(batches["held_out"]))
    for rate in (TIMES * settings.rate, settings.rate):
        for name, start in models.items():
            model, run = copy.deepcopy(start), Run(name, rate)
            progress.stage(f"{name}, rate {rate:g}")

            def each_step(step: int, model: Any = model, run: Run = run) -> None:
                progress.advance(tokens if step else 0)
                if step % every == 0 or step == settings.continued_steps:
                    run.measured[step] = measure(model, batches["held_out"])
                    progress.advance(evaluated)
                    if not step:
                        runs.append(run)

            torch.manual_seed(settings.seed)  # the same dropout in all runs
            warmup = settings.continued_steps // 10
            train(model, batches["continued"], rate=rate, warmup=warmup, decay=True, desc=None, each_step=each_step)
            progress.print(run.row(settings.continued_steps))
            write()


def _write(report: dict[str, Any], conversion: dict[str, Measured], runs: list[Run], folder: Path) -> None:
    """Write report and plot, each atomically."""
    from hf_qknorm.demo.run_plots import plot_results  # imports matplotlib

    report["runs"] = [run.to_dict() for run in runs]
    plot_results(conversion, runs, folder / PLOT)
    save_json(to_json(report), folder / REPORT)


def _print_start(settings: Settings, seconds: float) -> None:
    text = settings.data or "Python's standard library"
    then = ", and train it on beside the unpatched model" if settings.continued_steps else ""
    print(
        f"Demo: convert {settings.checkpoint or 'a small Llama'} to {settings.scheme}{then}.\n"
        f"It takes about {format_seconds(seconds)} here, with {threads()}. Ctrl-C keeps the results so far.\n"
        f"Losses are in nats per token, on the last tenth of the text: {text}.\n",
        flush=True,
    )


def _print_saved(report: dict[str, Any], calibration: Calibration, settings: Settings, progress: Progress) -> None:
    bound = "" if calibration.bound is None else f": |logit| ≤ {calibration.bound:.1f} for any input, before any cap"
    out, reloaded, written = Path(settings.out), report["reloaded"], report["texts"]
    progress.print(
        f"   calibrated with {calibration.title}{bound}\n   first plot: {out / PLOT}\n   checkpoint: {out / MODEL}, "
        f"reloaded in a new process as {reloaded['class']}: logits differ by {reloaded['largest_difference']:g}"
    )
    without = f"without norms: {report['removed']}"
    progress.print(textwrap.fill(without, WIDTH, initial_indent="   ", subsequent_indent="   "))
    progress.print("\nwritten after the beginning of the held-out text, by the most likely tokens:")
    progress.print("\n".join(quoted(name, text) for name, text in written.items()))
    if settings.continued_steps:
        progress.print(
            f"\ntrained on: {settings.continued_steps} more steps from unpatched and from calibrated, on the same text "
            f"in the same order\n{RUN_HEADER}"
        )


def _print_end(runs: list[Run], settings: Settings, out: Path) -> None:
    if runs:
        print(f"\n{summary(runs, settings.rate)}")
    print(f"\nwritten: {', '.join(str(out / name) for name in WRITTEN)}")
    print(f"next step: hf-qknorm inspect {shlex.quote(str(out / MODEL))} (this model, head by head)")
    print("then, with your own model and text: hf-qknorm convert CKPT NEW --data TEXT")
