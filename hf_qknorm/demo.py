"""`hf-qknorm demo`: train a small model, convert it, and train it on beside the unpatched one, at two rates."""

from __future__ import annotations

import copy
import logging
import shlex
import textwrap
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch
from pydantic_core import to_jsonable_python
from torch import Tensor
from tqdm.auto import tqdm

from hf_qknorm.calibration.calibrate import calibrate
from hf_qknorm.checkpoint import load_causal, open_source, quiet_transformers
from hf_qknorm.convert.card import write_card
from hf_qknorm.families import family_of
from hf_qknorm.files.atomic_io import new_folder
from hf_qknorm.files.formatting import format_fixed
from hf_qknorm.files.log import logger
from hf_qknorm.files.paths import check_folder, check_writable, user_path
from hf_qknorm.files.progress import progress_bar
from hf_qknorm.files.untrusted import load_tokenizer
from hf_qknorm.measure.batches import check_batches
from hf_qknorm.measure.predictions import require_causal
from hf_qknorm.measure.text import check_text, load_text, sample_batches, sequence_length, tokenize
from hf_qknorm.model.configs import QKNormConfig
from hf_qknorm.patch import patch_model
from hf_qknorm.plots import draw_demo
from hf_qknorm.reports.inspection import scheme_name
from hf_qknorm.reports.report import save_json
from hf_qknorm.scheme import Scheme
from hf_qknorm.small_model import LENGTH, Run, aligned, byte_tokenizer, mean_loss, measure, small_llama, train

REPORT, PLOT, MODEL = WRITTEN = ("demo.json", "demo.png", "model")
BATCH, RUN_BATCH = 8, 2  # sequences in a batch, and in one of continued training
STEPS, BASE_RATE, TIMES = 80, 2e-3, 10  # of continued training; of the small Llama; of the usual rate, for two runs
LOOKS = 5  # evaluations of a run
WIDTH = 118  # characters of a line with a text
Batches = dict[str, list[Tensor]]
BAR: Final = "{desc}: {percentage:3.0f}%|{bar:30}| {elapsed} so far, about {remaining} left"


def run_demo(
    data: str | None = None,
    checkpoint: str | None = None,
    scheme: Scheme | str = "qk_norm_cap",
    *,
    base_steps: int = 80,
    steps: int | None = None,
    rate: float = 1e-3,
    out: str = "./qknorm-demo",
) -> None:
    """Run the demo: print its progress and results, and write report, figure and model into the folder `out`.

    The converted model, report and figure replace those of an earlier demo, each as a whole: report and figure after
    the conversion, and after each run. The small Llama computes with one thread; a checkpoint, not trained on by
    default, with as many as torch has.

    Raises OSError, before any work, for a folder that can't be written to, or that holds other files than a checkpoint
    under the name of the model's.
    """
    folder, scheme = user_path(out, "out"), Scheme.of(scheme)
    check_writable(folder / REPORT, folder / PLOT)
    check = partial(check_folder, folder / MODEL, overwrite=True, sources=[checkpoint, data])
    check()
    check_text(data)
    logger.setLevel(logging.ERROR)  # the tables have the same numbers
    threads, more = torch.get_num_threads(), STEPS if steps is None and checkpoint is None else steps or 0
    torch.set_num_threads(1 if checkpoint is None else threads)
    torch.manual_seed(0)
    try:
        tokenizer, base, batches = _prepare(data, checkpoint, scheme, base_steps, more)
        then, text = ", and train it on beside the unpatched model" * bool(more), data or "Python's standard library"
        print(f"Demo: convert {checkpoint or 'a small Llama'} to {scheme_name(scheme)}{then}.")
        print("Ctrl-C keeps the results so far.")
        print(f"Losses are in nats per token, on the last tenth of the text: {text}.\n", flush=True)
        with closing(_progress(batches, trains_base=checkpoint is None)) as bar:
            if checkpoint is None:
                _train_base(base, batches, bar)
            models, report = _convert(base, scheme, batches, bar)
            with new_folder(folder / MODEL, check) as new, quiet_transformers():
                models["calibrated"].eval().save_pretrained(new)  # with the record of its calibration
                tokenizer.save_pretrained(new)
                write_card(new)
            _write(report, [], folder)
            _say(f"   figure: {folder / PLOT}\n   checkpoint: {folder / MODEL}")
            if more:
                _train_on(models, report["conversion"], batches, rate, bar, partial(_write, report, folder=folder))
    finally:
        torch.set_num_threads(threads)
    print(f"\nwritten: {', '.join(str(folder / name) for name in WRITTEN)}")
    print(f"next step: hf-qknorm inspect {shlex.quote(str(folder / MODEL))} (this model, head by head)")
    print("then, with your own model and text: hf-qknorm convert CKPT NEW --data TEXT")


def _prepare(
    data: str | None, checkpoint: str | None, scheme: Scheme, base_steps: int, steps: int
) -> tuple[Any, Any, Batches]:
    """Tokenizer, model and batches. Batches come first: too little text is found before a model is loaded."""

    def draw(tokenizer: Any, length: int) -> Batches:
        text = load_text(data)
        seen, rest = (tokenize(tokenizer, part) for part in (text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]))
        sizes = {"base": (base_steps, BATCH), "calibration": (8, BATCH), "continued": (steps, RUN_BATCH)}
        draws = enumerate(sizes.items(), start=1)
        batches = {name: sample_batches(seen, *size, length, number) for number, (name, size) in draws}
        return batches | {"held_out": sample_batches(rest, 4, BATCH, length, 0)}

    if checkpoint is None:
        tokenizer = byte_tokenizer()
        return tokenizer, small_llama(2), draw(tokenizer, LENGTH)
    source = open_source(checkpoint)
    if isinstance(source.config, QKNormConfig):
        raise ValueError(f"{source.name} is converted already: give the original checkpoint")
    family_of(source.config, scheme.resolve())  # raises for what is not supported
    require_causal(source.config)
    tokenizer = load_tokenizer(source.folder)
    batches = draw(tokenizer, sequence_length(source.config))
    check_batches([{"input_ids": batch} for batch in batches["held_out"]], source.config)
    return tokenizer, load_causal(source, dtype=torch.float32), batches


def _progress(batches: Batches, *, trains_base: bool) -> Any:
    """A bar over the whole demo; its unit is the work of training on a token."""
    tokens = {name: sum(batch.numel() for batch in found) for name, found in batches.items()}
    total = tokens["base"] * trains_base + 4 * tokens["calibration"]  # a conversion is as much work
    total += 4 * (tokens["continued"] + LOOKS * tokens["held_out"] // 2) if tokens["continued"] else 0
    return progress_bar(total=total, desc="starting", bar_format=BAR, mininterval=1, smoothing=0.02)


def _say(text: str) -> None:
    """Print text above the bar, at once even into a pipe."""
    with tqdm.external_write_mode():
        print(text, flush=True)


def _train_base(base: Any, batches: Batches, bar: Any) -> None:
    bar.set_description_str("training a small Llama")
    tokens, steps = batches["base"][0].numel(), len(batches["base"])
    train(base, batches["base"], BASE_RATE, warmup=20, each_step=lambda n: bar.update(tokens * bool(n)))
    size, loss = sum(p.numel() for p in base.parameters()) / 1e6, mean_loss(base, batches["held_out"])
    _say(f"trained: a Llama of {size:.1f} million parameters: loss {loss:.3f} after {steps} steps\n")


def _convert(base: Any, scheme: Scheme, batches: Batches, bar: Any) -> tuple[dict[str, Any], ...]:
    """The models "unpatched" and "calibrated", and the report of the conversion."""
    bar.set_description_str("converting")
    held_out, converted = batches["held_out"], patch_model(copy.deepcopy(base), scheme)
    models = {"unpatched": patch_model(base, "none"), "calibrated": converted}
    conversion = {"unpatched": measure(models["unpatched"], held_out), "fresh gains": measure(converted, held_out)}
    calibration = calibrate(converted, batches["calibration"])
    conversion["calibrated"] = measure(converted, held_out)
    bar.update(4 * sum(batch.numel() for batch in batches["calibration"]))
    _say(f"converted: {converted.config.scheme}\n{aligned('', 'held-out loss', 'largest |logit|')}")
    for name, each in conversion.items():
        _say(aligned(name, f"{each.loss:.3f}", format_fixed(each.max_logit, 1)))
    _say(textwrap.fill(str(calibration), WIDTH, initial_indent="   ", subsequent_indent="   "))
    return models, {"scheme": scheme, "conversion": conversion, "calibration": calibration.to_dict()}


def _train_on(
    models: dict[str, Any], before: dict[str, Any], batches: Batches, rate: float, bar: Any, write: Callable[..., None]
) -> None:
    """Train a copy of each model at each rate, on the same batches; report and figure are written after each.

    `before` has what was measured of the models.
    """
    steps, tokens = len(batches["continued"]), batches["continued"][0].numel()
    every, looking = max(steps // LOOKS, 1), sum(batch.numel() for batch in batches["held_out"]) // 2
    _say(f"\ntrained on: {steps} more steps from unpatched and from calibrated, on the same text in the same order")
    _say(aligned("", "loss before", "loss after", "largest |logit|"))
    runs: list[Run] = []
    for pace, (name, start) in product((TIMES * rate, rate), models.items()):
        model, run = copy.deepcopy(start), Run(name, pace, {0: before[name]})
        bar.set_description_str(f"{name}, rate {pace:g}")

        def look(step: int, model: Any = model, run: Run = run) -> None:
            bar.update(tokens if step else 0)
            if step and (step % every == 0 or step == steps):
                run.measured[step] = measure(model, batches["held_out"])
                bar.update(looking)

        torch.manual_seed(0)  # the same dropout in all runs
        train(model, batches["continued"], pace, warmup=steps // 10, each_step=look)
        runs.append(run)
        _say(run.row())
        write(runs)


def _write(report: dict[str, Any], runs: list[Run], folder: Path) -> None:
    """Write report and figure, each atomically."""
    draw_demo(report["conversion"], runs, folder / PLOT)
    save_json(to_jsonable_python({**report, "runs": runs}, exclude_none=True), folder / REPORT)
