"""The demo's steps, in order: text, base model, three runs, table, plots, checkpoint, reload."""

from __future__ import annotations

import copy
import json
import logging
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm

from hf_qknorm.checkpoint.destinations import check_folder
from hf_qknorm.checkpoint.source import open_source
from hf_qknorm.convert.calibrate import calibrate, length_for
from hf_qknorm.convert.pretrained import load_causal, load_tokenizer
from hf_qknorm.convert.text import check_batches, check_text, load_text, sample_batches, tokenize
from hf_qknorm.demo.training import BATCH, LENGTH, byte_tokenizer, mean_loss, small_llama, train
from hf_qknorm.families import check_scheme, family_of
from hf_qknorm.files.atomic_io import new_folder
from hf_qknorm.files.names import unknown_files
from hf_qknorm.files.paths import user_path
from hf_qknorm.model.configs import QKNormConfig
from hf_qknorm.patch import patch_model
from hf_qknorm.scheme import SCHEMES, Scheme
from hf_qknorm.stats.logit_statistics import logit_statistics
from hf_qknorm.stats.measure import require_causal
from hf_qknorm.stats.report import Calibration, save_json

HELD_OUT = 0.1  # the last tenth of the text
EVAL_BATCHES = 6
CALIBRATION_BATCHES = 8
REPORT, LOSSES, LOGITS, MODEL = WRITTEN = ("report.json", "loss.png", "logits.png", "model")


@dataclass(frozen=True)
class Settings:
    """What `hf-qknorm demo` can be told."""

    data: str | None = None
    checkpoint: str | None = None
    scheme: str = "qk_norm_cap"
    base_steps: int = 200
    steps: int = 60
    rate: float = 3e-4
    out: str = "./qknorm-demo"
    seed: int = 0


@dataclass(frozen=True)
class _Batches:
    base: list[Tensor]
    calibration: list[Tensor]
    continued: list[Tensor]
    held_out: list[Tensor]


def run(settings: Settings) -> dict[str, Any]:
    """The whole story; prints as it goes, writes the folder `settings.out`, and returns the report.

    The folder appears at once when all is written. One that is there is replaced where an earlier demo wrote it.

    Raises FileExistsError, before anything else, for a folder that holds something else, or the checkpoint or the text.
    """
    out = user_path(settings.out, "out")
    sources = [settings.checkpoint, settings.data]
    marker = (REPORT, "reloaded")
    check = partial(check_folder, out, overwrite=True, sources=sources, marker=marker, unknown=_unknown_files)
    check()
    scheme = Scheme.of(settings.scheme)
    check_text(settings.data)
    logging.getLogger("hf_qknorm").setLevel(logging.ERROR)  # the table below says what its log lines would
    torch.manual_seed(settings.seed)
    tokenizer, base, batches = _start(settings, scheme)
    if settings.checkpoint is None:
        train(base, batches.base, rate=2e-3, warmup=20, decay=True, what="training a small Llama")
    models = {name: copy.deepcopy(base) for name in ("unpatched", "fresh gains", "calibrated")}
    for name, model in models.items():
        patch_model(model, SCHEMES["none"] if name == "unpatched" else scheme)
    calibration = calibrate(models["calibrated"], batches.calibration)
    from hf_qknorm.demo.run_plots import plot_logits, plot_losses  # loads matplotlib

    runs = {name: _continue(model, batches, settings, name) for name, model in models.items()}
    with new_folder(out, check) as folder:
        models["calibrated"].eval().save_pretrained(folder / MODEL)
        tokenizer.save_pretrained(folder / MODEL)
        plot_losses(runs, calibration, folder / LOSSES)
        plot_logits(runs, scheme.softcap, folder / LOGITS)
        report = {
            "scheme": scheme.to_dict(),
            "settings": vars(settings),
            "parameters": sum(p.numel() for p in base.parameters()),
            "calibration": calibration.to_dict(),
            "runs": runs,
            "reloaded": _reload(models["calibrated"], batches.held_out[0], folder / MODEL),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }
        save_json(report, folder / REPORT)
    _tell(report, calibration, out)
    return report


def _unknown_files(folder: Path) -> list[str]:
    """What lies in a folder and is not from a demo."""
    found = [item.name for item in sorted(folder.iterdir()) if item.name not in WRITTEN]
    return found + ([f"{MODEL}/{name}" for name in unknown_files(folder / MODEL)] if (folder / MODEL).is_dir() else [])


def _start(settings: Settings, scheme: Scheme) -> tuple[Any, Any, _Batches]:
    """Tokenizer, model and batches, the batches made before a model is loaded: there may be too little text."""
    if settings.checkpoint is None:
        tokenizer = byte_tokenizer()
        batches = _batches(tokenizer, settings, LENGTH)
        return tokenizer, small_llama(), batches
    with open_source(settings.checkpoint) as source:
        if isinstance(source.config, QKNormConfig):
            raise ValueError(
                f"{source.name} is converted already ({source.config.scheme}): give the original checkpoint"
            )
        family = family_of(source.config)
        require_causal(source.config)
        check_scheme(source.config.model_type, source.config, scheme.resolve(family.norm))
        tokenizer = load_tokenizer(source.folder)
        batches = _batches(tokenizer, settings, length_for(source.config))
        check_batches([{"input_ids": batch} for batch in batches.held_out], source.config)
        return tokenizer, load_causal(source, torch.float32), batches


def _batches(tokenizer: Any, settings: Settings, length: int) -> _Batches:
    text = load_text(settings.data)
    cut = int(len(text) * (1 - HELD_OUT))
    seen, held_out = tokenize(tokenizer, text[:cut]), tokenize(tokenizer, text[cut:])
    seed = settings.seed
    return _Batches(
        base=sample_batches(seen, settings.base_steps, BATCH, length, seed + 1),
        calibration=sample_batches(seen, CALIBRATION_BATCHES, BATCH, length, seed + 2),
        continued=sample_batches(seen, settings.steps, BATCH, length, seed + 3),
        held_out=sample_batches(held_out, EVAL_BATCHES, BATCH, length, seed),
    )


def _continue(model: Any, batches: _Batches, settings: Settings, name: str) -> dict[str, Any]:
    """Train on the common batches, and look at held-out loss and logits every few steps."""
    held_out: list[tuple[int, float]] = []
    largest: list[tuple[int, float]] = []
    every = max(settings.steps // 6, 1)
    by_head: list[list[float]] = []

    def look(step: int) -> None:
        if step % every and step != settings.steps:
            return
        with logit_statistics(model) as statistics:
            held_out.append((step, mean_loss(model, batches.held_out)))
        by_head[:] = [layer.max_logit.tolist() for layer in statistics.values()]
        largest.append((step, max(map(max, by_head))))

    train(model, batches.continued, rate=settings.rate, what=f"continuing: {name}", each_step=look)
    return {"held_out": held_out, "max_logit": largest, "max_logit_by_head": by_head}


def _reload(model: Any, batch: Tensor, folder: Path) -> dict[str, Any]:
    """Load the saved checkpoint in a new process, and compare its logits with the ones computed here."""
    with torch.no_grad():
        logits = model(input_ids=batch).logits
    with TemporaryDirectory(prefix="hf-qknorm-") as temporary, tqdm(total=1, desc="reloading in a new process") as bar:
        expected = Path(temporary, "expected.safetensors")
        save_file({"input_ids": batch, "logits": logits.contiguous()}, expected)
        command = [sys.executable, "-m", "hf_qknorm.demo.reload", str(folder), str(expected)]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        bar.update()
    if finished.returncode:
        raise RuntimeError(f"the saved checkpoint could not be loaded in a new process:\n{finished.stderr}")
    return json.loads(finished.stdout)


def _tell(report: dict[str, Any], calibration: Calibration, out: Path) -> None:
    steps = report["settings"]["steps"]
    print(f"\n{report['parameters']:,} parameters, scheme {report['settings']['scheme']}\n\ncalibrate(): {calibration}")
    print(f"\n{_largest_logits(calibration)}\n\non held-out text:\n")
    print(f"{'':14}{'loss at step 0':>16}{f'after {steps} steps':>16}{'max |logit| at 0':>18}{f'after {steps}':>10}")
    for name, run in report["runs"].items():
        (_, first), (_, last) = run["held_out"][0], run["held_out"][-1]
        (_, logit), (_, last_logit) = run["max_logit"][0], run["max_logit"][-1]
        print(f"{name:14}{first:16.3f}{last:16.3f}{logit:18.1f}{last_logit:10.1f}")
    reloaded = report["reloaded"]
    print(f"\nreloaded in a new process as {reloaded['class']}: logits differ by {reloaded['largest_difference']:g}")
    print(f"it goes on writing: {reloaded['prompt'].splitlines()[-1] if reloaded['prompt'] else ''}▸{reloaded['text']}")
    print(f"\nwritten: {', '.join(str(out / name) for name in WRITTEN)}/")


def _largest_logits(calibration: Calibration) -> str:
    """The largest logits before and after, and what bounds them."""
    sides = [[max(side.max_logit) for side in (layer.before, layer.after)] for layer in calibration.layers.values()]
    before, after = map(max, zip(*sides, strict=True))
    seen = f"largest |logit| seen there: {before:.1f} unpatched, {after:.1f} calibrated"
    if calibration.bound is None:
        return seen
    bounded = f"{seen}; no input can give one over {calibration.bound:.1f}, before any cap"
    if not calibration.scheme.knee:
        return bounded
    return (
        f"{bounded}\nthe norms have a knee of {calibration.scheme.knee:g}: shorter vectors keep their length, longer "
        "ones are bounded"
    )
