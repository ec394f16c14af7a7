"""`hf-qknorm demo`: train a small model, convert it, and train it on beside the unpatched one, at two rates."""

from __future__ import annotations

import copy
import json
import logging
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from hf_qknorm.calibration.calibrate import calibrate
from hf_qknorm.checkpoint.destinations import check_folder
from hf_qknorm.checkpoint.pretrained import load_causal, load_tokenizer
from hf_qknorm.checkpoint.source import open_source
from hf_qknorm.demo.progress import Progress, evaluation_work, format_seconds, progress_bar, seconds_per_token, threads
from hf_qknorm.demo.results import RUN_HEADER, Measured, Run, conversion_table, summary
from hf_qknorm.demo.training import BATCH, LENGTH, byte_tokenizer, mean_loss, one_thread, small_llama, train
from hf_qknorm.families import check_scheme, family_of
from hf_qknorm.files.atomic_io import is_leftover, new_folder
from hf_qknorm.files.names import unknown_files
from hf_qknorm.files.paths import user_path
from hf_qknorm.hub.card import write_card
from hf_qknorm.measure.logit_statistics import logit_statistics
from hf_qknorm.measure.predictions import require_causal
from hf_qknorm.measure.text import check_batches, check_text, default_length, load_text, sample_batches, tokenize
from hf_qknorm.model.configs import QKNormConfig
from hf_qknorm.patch import patch_model
from hf_qknorm.reports.records import to_json
from hf_qknorm.reports.report import Calibration, save_json
from hf_qknorm.scheme import Scheme
from hf_qknorm.training.logit_log import nan_as_inf

HELD_OUT = 0.1  # the last tenth of the text
HELD_OUT_BATCHES, CALIBRATION_BATCHES = 4, 8
LAYERS = 2  # of the small Llama
BASE_RATE = 2e-3  # of its training
TIMES = 10  # the second pair of runs has this many times the usual rate
RUN_BATCH = 4  # sequences in a batch of continued training
LOOKS = 8  # evaluations of a run after the first
CONVERSION = 4  # its work, with saving and reloading, is about that of training on the calibration text this many times
REPORT, PLOT, MODEL = WRITTEN = ("report.json", "loss.png", "model")
EARLIER = ("logits.png",)  # written by demos of version 0.2.0

Batches = dict[str, list[Tensor]]


@dataclass(frozen=True)
class Settings:
    """The options of `hf-qknorm demo`."""

    data: str | None = None
    checkpoint: str | None = None
    scheme: str = "qk_norm_cap"
    base_steps: int = 120
    steps: int = 200
    rate: float = 1e-3
    out: str = "./qknorm-demo"
    seed: int = 0


def run_demo(settings: Settings) -> dict[str, Any]:
    """Run the demo: print its progress and results, write the folder `settings.out`, and return the report.

    The folder appears once the model is converted, whole. From then on report and plot are replaced after each run, and
    when the demo is interrupted. The folder of an earlier demo is replaced. The small Llama computes with one thread,
    the model of `settings.checkpoint` with as many as torch has.

    Raises FileExistsError, before any work, if the folder has other files, the checkpoint or the text in it.
    """
    out = user_path(settings.out, "out")
    sources = [settings.checkpoint, settings.data]
    marker = (REPORT, "reloaded")
    check = partial(check_folder, out, overwrite=True, sources=sources, marker=marker, unknown=_unknown_files)
    check()
    scheme = Scheme.of(settings.scheme)
    check_text(settings.data)
    logging.getLogger("hf_qknorm").setLevel(logging.ERROR)  # the tables say what the log would
    with one_thread() if settings.checkpoint is None else nullcontext():
        return _run(settings, scheme, out, check)


def _run(settings: Settings, scheme: Scheme, out: Path, check: Callable[[], None]) -> dict[str, Any]:
    torch.manual_seed(settings.seed)
    tokenizer, batches, base = _prepare(settings, scheme)
    work = _work(batches, trains_base=settings.checkpoint is None)
    _print_start(settings, seconds_per_token(base, batches["continued"][0]) * work)
    with progress_bar(work) as progress:
        if settings.checkpoint is None:
            _train_base(base, batches, progress)
        models, conversion, calibration = _convert(base, scheme, batches, progress)
        runs: list[Run] = []
        report: dict[str, Any] = {
            "scheme": scheme.to_dict(),
            "settings": vars(settings),
            "parameters": sum(p.numel() for p in base.parameters()),
            "conversion": {name: asdict(each) for name, each in conversion.items()},
            "calibration": calibration.to_dict(),
            "runs": [],
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }
        with new_folder(out, check) as folder:
            models["calibrated"].eval().save_pretrained(folder / MODEL)  # with the record of its calibration
            tokenizer.save_pretrained(folder / MODEL)
            write_card(folder / MODEL)
            report["reloaded"] = _reload(models["calibrated"], batches["held_out"][0], folder / MODEL)
            _write(report, conversion, runs, folder)
        _print_saved(report, calibration, out, progress)
        try:
            _train_on(models, batches, settings, runs, progress, lambda: _write(report, conversion, runs, out))
        except BaseException:
            _write(report, conversion, runs, out)
            if runs and runs[-1].steps < settings.steps:
                progress.print(runs[-1].row(settings.steps))
            raise
    _print_end(runs, settings, out)
    return report


def _unknown_files(folder: Path) -> list[str]:
    """The files and folders that no demo writes."""
    items = [item for item in sorted(folder.iterdir()) if not is_leftover(item)]
    found = [item.name for item in items if item.name not in WRITTEN + EARLIER]
    return found + ([f"{MODEL}/{name}" for name in unknown_files(folder / MODEL)] if (folder / MODEL).is_dir() else [])


def _prepare(settings: Settings, scheme: Scheme) -> tuple[Any, Batches, Any]:
    """Tokenizer, batches and model. Batches come first: too little text is found before a model is loaded."""
    if settings.checkpoint is None:
        tokenizer = byte_tokenizer()
        return tokenizer, _batches(tokenizer, settings, LENGTH), small_llama(LAYERS)
    with open_source(settings.checkpoint) as source:
        if isinstance(source.config, QKNormConfig):
            raise ValueError(
                f"{source.name} is converted already ({source.config.scheme}): give the original checkpoint"
            )
        family_of(source.config)  # raises for a type that is not supported
        require_causal(source.config)
        check_scheme(source.config.model_type, source.config, scheme.resolve())
        tokenizer = load_tokenizer(source.folder)
        batches = _batches(tokenizer, settings, default_length(source.config))
        check_batches([{"input_ids": batch} for batch in batches["held_out"]], source.config)
        return tokenizer, batches, load_causal(source, torch.float32)


def _batches(tokenizer: Any, settings: Settings, length: int) -> Batches:
    text = load_text(settings.data)
    cut = int(len(text) * (1 - HELD_OUT))
    seen, held_out = tokenize(tokenizer, text[:cut]), tokenize(tokenizer, text[cut:])
    sizes = {
        "base": (settings.base_steps, BATCH),
        "calibration": (CALIBRATION_BATCHES, BATCH),
        "continued": (settings.steps, RUN_BATCH),
    }
    seeds = enumerate(sizes.items(), start=settings.seed + 1)
    batches = {name: sample_batches(seen, *size, length, seed) for seed, (name, size) in seeds}
    return batches | {"held_out": sample_batches(held_out, HELD_OUT_BATCHES, BATCH, length, settings.seed)}


def _tokens(batches: list[Tensor]) -> int:
    return sum(batch.numel() for batch in batches)


def _work(batches: Batches, *, trains_base: bool) -> int:
    """The length of the progress bar: all training, the conversion, and the evaluations of the four runs."""
    evaluations = (LOOKS + 1) * evaluation_work(_tokens(batches["held_out"]))
    once = _tokens(batches["base"]) * trains_base + CONVERSION * _tokens(batches["calibration"])
    return once + 4 * (_tokens(batches["continued"]) + evaluations)


def _train_base(base: Any, batches: Batches, progress: Progress) -> None:
    progress.stage("training a small Llama")
    count, tokens = sum(p.numel() for p in base.parameters()), batches["base"][0].numel()
    each_step = lambda step: progress.advance(tokens if step else 0)  # noqa: E731
    train(base, batches["base"], rate=BASE_RATE, warmup=20, decay=True, desc=None, each_step=each_step)
    loss = mean_loss(base, batches["held_out"])
    steps = len(batches["base"])
    progress.print(f"trained: a Llama of {count / 1e6:.1f} million parameters: loss {loss:.3f} after {steps} steps\n")


def _convert(
    base: Any, scheme: Scheme, batches: Batches, progress: Progress
) -> tuple[dict[str, Any], dict[str, Measured], Calibration]:
    """The models "unpatched" and "calibrated", and the losses of both and of the model with fresh gains."""
    progress.stage("converting")
    converted = patch_model(copy.deepcopy(base), scheme)
    models = {"unpatched": patch_model(base, "none"), "calibrated": converted}
    measure = partial(_measure, batches=batches["held_out"])
    conversion = {"unpatched": measure(models["unpatched"]), "fresh gains": measure(converted)}
    calibration = calibrate(converted, batches["calibration"])
    conversion["calibrated"] = measure(converted)
    progress.advance(CONVERSION * _tokens(batches["calibration"]))
    progress.print(f"converted: {converted.config.scheme}\n{conversion_table(conversion)}")
    return models, conversion, calibration


def _measure(model: Any, batches: list[Tensor]) -> Measured:
    with logit_statistics(model) as statistics:
        loss = mean_loss(model, batches)
    return Measured(loss, max((float(layer.max_logit.max()) for layer in statistics.values()), key=nan_as_inf))


def _reload(model: Any, batch: Tensor, folder: Path) -> dict[str, Any]:
    """Load the saved checkpoint in a new process, and compare its logits with the model's."""
    with torch.no_grad():
        logits = model(input_ids=batch).logits
    with TemporaryDirectory(prefix="hf-qknorm-") as temporary:
        expected = Path(temporary, "expected.safetensors")
        save_file({"input_ids": batch, "logits": logits.contiguous()}, expected)
        arguments = [str(folder), str(expected), str(torch.get_num_threads())]
        command = [sys.executable, "-m", "hf_qknorm.demo.check_reload", *arguments]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise RuntimeError(f"the saved checkpoint could not be loaded in a new process:\n{finished.stderr}")
    return json.loads(finished.stdout)


def _train_on(
    models: dict[str, Any],
    batches: Batches,
    settings: Settings,
    runs: list[Run],
    progress: Progress,
    write: Callable[[], None],
) -> None:
    """Train a copy of each model at each rate, on the same batches, and call `write` after each; adds to `runs`."""
    every, tokens = max(settings.steps // LOOKS, 1), batches["continued"][0].numel()
    evaluated = evaluation_work(_tokens(batches["held_out"]))
    for rate in (TIMES * settings.rate, settings.rate):
        for name, start in models.items():
            model, run = copy.deepcopy(start), Run(name, rate)
            progress.stage(f"{name}, rate {rate:g}")

            def each_step(step: int, model: Any = model, run: Run = run) -> None:
                progress.advance(tokens if step else 0)
                if step % every == 0 or step == settings.steps:
                    run.measured[step] = _measure(model, batches["held_out"])
                    progress.advance(evaluated)
                    if not step:
                        runs.append(run)

            torch.manual_seed(settings.seed)  # the same dropout in all runs
            warmup = settings.steps // 10
            train(model, batches["continued"], rate=rate, warmup=warmup, decay=True, desc=None, each_step=each_step)
            progress.print(run.row(settings.steps))
            write()


def _write(report: dict[str, Any], conversion: dict[str, Measured], runs: list[Run], folder: Path) -> None:
    """Write report and plot, each atomically."""
    from hf_qknorm.demo.run_plots import plot_results  # imports matplotlib

    report["runs"] = [run.to_dict() for run in runs]
    plot_results(conversion, runs, folder / PLOT)
    save_json(to_json(report), folder / REPORT)


def _print_start(settings: Settings, seconds: float) -> None:
    text = settings.data or "Python's standard library"
    print(
        f"Demo: convert {settings.checkpoint or 'a small Llama'} to {settings.scheme}, and train it on beside the "
        f"unpatched model.\nIt takes about {format_seconds(seconds)} here, with {threads()}. Ctrl-C keeps the results "
        f"so far.\nLosses are in nats per token, on the last tenth of the text: {text}.\n",
        flush=True,
    )


def _print_saved(report: dict[str, Any], calibration: Calibration, out: Path, progress: Progress) -> None:
    bound = "" if calibration.bound is None else f": |logit| ≤ {calibration.bound:.1f} for any input, before any cap"
    reloaded, steps = report["reloaded"], report["settings"]["steps"]
    progress.print(
        f"   calibrated with {calibration.title}{bound}\n   first plot: {out / PLOT}\n   checkpoint: {out / MODEL}, "
        f"reloaded in a new process as {reloaded['class']}: logits differ by {reloaded['largest_difference']:g}\n\n"
        f"trained on: {steps} more steps from unpatched and from calibrated, on the same text in the same order\n"
        f"{RUN_HEADER}"
    )


def _print_end(runs: list[Run], settings: Settings, out: Path) -> None:
    print(f"\n{summary(runs, settings.rate)}\n\nwritten: {', '.join(str(out / name) for name in WRITTEN)}")
    print(f"next step: hf-qknorm inspect {shlex.quote(str(out / MODEL))} (this model, head by head)")
    print("then, with your own model and text: hf-qknorm convert CKPT NEW --calibrate TEXT")
