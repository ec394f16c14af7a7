"""`hf-qknorm demo`: train a small model, convert it, and train it on beside the unpatched one, at two rates."""

from __future__ import annotations

import copy
import logging
import math
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm

from hf_qknorm.calibration.calibrate import calibrate
from hf_qknorm.checkpoint import load_causal, load_tokenizer, open_source, quiet_transformers
from hf_qknorm.convert.card import write_card
from hf_qknorm.families import check_scheme, family_of
from hf_qknorm.files.atomic_io import new_folder
from hf_qknorm.files.formatting import format_fixed
from hf_qknorm.files.log import logger
from hf_qknorm.files.names import other_files
from hf_qknorm.files.paths import check_folder, user_path
from hf_qknorm.files.progress import progress_bar
from hf_qknorm.files.untrusted import check_positive
from hf_qknorm.measure.batches import check_batches
from hf_qknorm.measure.predictions import require_causal
from hf_qknorm.measure.text import check_text, default_length, load_text, sample_batches, tokenize
from hf_qknorm.model.configs import QKNormConfig
from hf_qknorm.model.knees import set_knee
from hf_qknorm.patch import patch_model
from hf_qknorm.reports.records import to_json
from hf_qknorm.reports.report import save_json
from hf_qknorm.scheme import Scheme
from hf_qknorm.small_model import LENGTH, Run, aligned, byte_tokenizer, mean_loss, measure, small_llama, train
from hf_qknorm.training.removal import remove_norms

REPORT, PLOT, MODEL = WRITTEN = ("report.json", "demo.png", "model")
BATCH, RUN_BATCH = 8, 4  # sequences in a batch, and in one of continued training
STEPS, BASE_RATE, TIMES = 120, 2e-3, 10  # of continued training; of the small Llama; of the usual rate, for two runs
LOOKS = 6  # evaluations of a run after the first
WIDTH, LEVEL = 118, 5e-4  # characters of a line with a text; nats, below which differences round to zero
Batches = dict[str, list[Tensor]]
BAR: Final = "{desc}: {percentage:3.0f}%|{bar:30}| {elapsed} so far, about {remaining} left"
# Run in a new process: the checkpoint's class, and the largest difference of its logits from stored ones.
RELOAD = """
import sys, torch, hf_qknorm
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(int(sys.argv[3]))  # the last digits of sums depend on it
model, stored = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval(), load_file(sys.argv[2])
AutoTokenizer.from_pretrained(sys.argv[1])
with torch.no_grad():
    difference = float((model(input_ids=stored["input_ids"]).logits - stored["logits"]).abs().max())
print(f"reloaded in a new process as {type(model).__name__}: logits differ by {difference:g}", end="")
"""


def run_demo(
    data: str | None = None,
    checkpoint: str | None = None,
    scheme: Scheme | str = "qk_norm_cap",
    *,
    base_steps: int = 120,
    steps: int | None = None,
    rate: float = 1e-3,
    out: str = "./qknorm-demo",
    seed: int = 0,
) -> dict[str, Any]:
    """Run the demo: print its progress and results, write the folder `out`, and return the report.

    The folder appears once the model is converted, whole. From then on report and figure are replaced after each run,
    and when the demo is interrupted. The folder of an earlier demo is replaced. The small Llama computes with one
    thread; a checkpoint, not trained on by default, with as many as torch has.

    Raises, before any work, ValueError for a rate that is not finite and > 0, and FileExistsError for other files.
    """
    folder, scheme = user_path(out, "out"), Scheme.of(scheme)
    check_positive(rate, "rate")
    options: dict[str, Any] = {"sources": [checkpoint, data], "marker": REPORT, "others": _other_files}
    check = partial(check_folder, folder, overwrite=True, **options)
    check()
    check_text(data)
    logger.setLevel(logging.ERROR)  # the tables have the same numbers
    threads, more = torch.get_num_threads(), STEPS if steps is None and checkpoint is None else steps or 0
    torch.set_num_threads(1 if checkpoint is None else threads)
    torch.manual_seed(seed)
    try:
        tokenizer, base, batches = _prepare(data, checkpoint, scheme, base_steps, more, seed)
        then, text = ", and train it on beside the unpatched model" * bool(more), data or "Python's standard library"
        print(f"Demo: convert {checkpoint or 'a small Llama'} to {scheme}{then}.\nCtrl-C keeps the results so far.")
        print(f"Losses are in nats per token, on the last tenth of the text: {text}.\n", flush=True)
        with closing(_progress(batches, trains_base=checkpoint is None)) as bar:
            if checkpoint is None:
                _train_base(base, batches, bar)
            models, report = _convert(base, scheme, batches, bar)
            with new_folder(folder, check) as new:
                with quiet_transformers():
                    models["calibrated"].eval().save_pretrained(new / MODEL)  # with the record of its calibration
                tokenizer.save_pretrained(new / MODEL)
                write_card(new / MODEL)
                report["reloaded"] = _reload(models["calibrated"], batches["held_out"][0], new / MODEL)
                _write(report, [], new)
            _say(f"   figure: {folder / PLOT}\n   checkpoint: {folder / MODEL}, {report['reloaded']}")
            runs = _train_on(models, batches, rate, seed, bar, partial(_write, report, folder=folder)) if more else []
    finally:
        torch.set_num_threads(threads)
    if runs:
        print(f"\n{summary(runs, rate)}")
    print(f"\nwritten: {', '.join(str(folder / name) for name in WRITTEN)}")
    print(f"next step: hf-qknorm inspect {shlex.quote(str(folder / MODEL))} (this model, head by head)")
    print("then, with your own model and text: hf-qknorm convert CKPT NEW --data TEXT")
    return report


def _prepare(
    data: str | None, checkpoint: str | None, scheme: Scheme, base_steps: int, steps: int, seed: int
) -> tuple[Any, Any, Batches]:
    """Tokenizer, model and batches. Batches come first: too little text is found before a model is loaded."""

    def draw(tokenizer: Any, length: int) -> Batches:
        text = load_text(data)
        seen, rest = (tokenize(tokenizer, part) for part in (text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]))
        sizes = {"base": (base_steps, BATCH), "calibration": (8, BATCH), "continued": (steps, RUN_BATCH)}
        draws = enumerate(sizes.items(), start=seed + 1)
        batches = {name: sample_batches(seen, *size, length, number) for number, (name, size) in draws}
        return batches | {"held_out": sample_batches(rest, 4, BATCH, length, seed)}

    if checkpoint is None:
        tokenizer = byte_tokenizer()
        return tokenizer, small_llama(2), draw(tokenizer, LENGTH)
    source = open_source(checkpoint)
    if isinstance(source.config, QKNormConfig):
        raise ValueError(f"{source.name} is converted already: give the original checkpoint")
    family_of(source.config)  # raises for a type that is not supported
    require_causal(source.config)
    check_scheme(source.config.model_type, source.config, scheme.resolve())
    tokenizer = load_tokenizer(source.folder)
    batches = draw(tokenizer, default_length(source.config))
    check_batches([{"input_ids": batch} for batch in batches["held_out"]], source.config)
    return tokenizer, load_causal(source, dtype=torch.float32), batches


def _progress(batches: Batches, *, trains_base: bool) -> Any:
    """A bar over the whole demo; its unit is the work of training on a token."""
    tokens = {name: sum(batch.numel() for batch in found) for name, found in batches.items()}
    total = tokens["base"] * trains_base + 4 * tokens["calibration"]  # a conversion is as much work
    total += 4 * (tokens["continued"] + (LOOKS + 1) * tokens["held_out"] // 2) if tokens["continued"] else 0
    return progress_bar(total=total, desc="starting", bar_format=BAR, mininterval=1, smoothing=0.02)


def _say(text: str) -> None:
    """Print text above the bar, at once even into a pipe."""
    with tqdm.external_write_mode():
        print(text, flush=True)


def _train_base(base: Any, batches: Batches, bar: Any) -> None:
    bar.set_description_str("training a small Llama")
    tokens, steps = batches["base"][0].numel(), len(batches["base"])
    train(base, batches["base"], BASE_RATE, warmup=20, decay=True, each_step=lambda n: bar.update(tokens * bool(n)))
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
    removed = _without_norms(converted, held_out)
    for text in (f"calibrated: {calibration}", f"without norms: {removed}"):
        _say(textwrap.fill(text, WIDTH, initial_indent="   ", subsequent_indent="   "))
    report = {"scheme": scheme, "conversion": conversion, "calibration": calibration.to_dict()}
    return models, {**report, "removed": removed}


def _without_norms(model: Any, batches: list[Tensor]) -> str:
    """The held-out loss of a copy of the model whose norms are removed, or the reason why they can't be."""
    bare = copy.deepcopy(model)
    try:
        set_knee(bare, math.inf)
        return f"held-out loss {mean_loss(remove_norms(bare), batches):.3f}"
    except ValueError as error:
        return f"not removed: {error}"


def _reload(model: Any, batch: Tensor, folder: Path) -> str:
    """Load the saved checkpoint in a new process, and compare its logits with the model's."""
    with torch.no_grad():
        logits = model(input_ids=batch).logits
    with TemporaryDirectory(prefix="hf-qknorm-") as temporary:
        expected = Path(temporary, "expected.safetensors")
        save_file({"input_ids": batch, "logits": logits.contiguous()}, expected)
        command = [sys.executable, "-c", RELOAD, str(folder), str(expected), str(torch.get_num_threads())]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the saved checkpoint could not be loaded in a new process:\n{done.stderr}")
    return done.stdout


def _train_on(
    models: dict[str, Any], batches: Batches, rate: float, seed: int, bar: Any, write: Callable[..., None]
) -> list[Run]:
    """Train a copy of each model at each rate, on the same batches; report and figure are written after each."""
    steps, tokens = len(batches["continued"]), batches["continued"][0].numel()
    every, looking = max(steps // LOOKS, 1), sum(batch.numel() for batch in batches["held_out"]) // 2
    _say(f"\ntrained on: {steps} more steps from unpatched and from calibrated, on the same text in the same order")
    _say(aligned("", "loss before", "loss after", "largest |logit|"))
    runs: list[Run] = []
    try:
        for pace, (name, start) in product((TIMES * rate, rate), models.items()):
            model, run = copy.deepcopy(start), Run(name, pace)
            bar.set_description_str(f"{name}, rate {pace:g}")

            def look(step: int, model: Any = model, run: Run = run) -> None:
                bar.update(tokens if step else 0)
                if step % every == 0 or step == steps:
                    run.measured[step] = measure(model, batches["held_out"])
                    bar.update(looking)
                    runs.extend([run] * (not step))

            torch.manual_seed(seed)  # the same dropout in all runs
            train(model, batches["continued"], pace, warmup=steps // 10, decay=True, each_step=look)
            _say(run.row(steps))
            write(runs)
    except BaseException:
        write(runs)
        if runs and runs[-1].steps < steps:
            _say(runs[-1].row(steps))
        raise
    return runs


def _write(report: dict[str, Any], runs: list[Run], folder: Path) -> None:
    """Write report and figure, each atomically."""
    from hf_qknorm.plots import draw_demo  # imports matplotlib

    draw_demo(report["conversion"], runs, folder / PLOT)
    save_json(to_json({**report, "runs": runs}), folder / REPORT)


def _other_files(folder: Path) -> list[str]:
    """The files and folders that no demo writes."""
    found = [item.name for item in sorted(folder.iterdir()) if item.name not in WRITTEN]
    return found + ([f"{MODEL}/{name}" for name in other_files(folder / MODEL)] if (folder / MODEL).is_dir() else [])


def summary(runs: list[Run], usual: float) -> str:
    """How both models ended, for each learning rate at which both were trained to the same step."""
    lines = []
    for first, second in zip(runs[::2], runs[1::2], strict=False):
        times = "" if first.rate == usual else f", {first.rate / usual:g} times {usual:g}"
        lines.append(f"At a rate of {first.rate:g}{times}:")
        for run in (first, second):
            end = _above(run.loss - run.measured[0].loss, "its start")
            lines.append(f"   the {run.model} model ends {end}, with logits up to {run.max_logit:.0f};")
        apart = second.loss - first.loss
        compared = f",\n   and {_above(apart, f'the end of the {first.model} model')}" if math.isfinite(apart) else ""
        lines[-1] = f"{lines[-1][:-1]}{compared}."
    return "\n".join(lines)


def _above(difference: float, reference: str) -> str:
    if not math.isfinite(difference):
        return "at a loss that is not finite"
    if abs(difference) < LEVEL:
        return f"level with {reference}"
    return f"{abs(difference):.3f} nats {'above' if difference > 0 else 'below'} {reference}"
