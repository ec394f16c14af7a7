"""`hf-qknorm demo`: train a small model, convert it, continue training, compare, and reload the checkpoint."""

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
from hf_qknorm.convert.calibrate import calibrate
from hf_qknorm.convert.pretrained import load_causal, load_tokenizer
from hf_qknorm.convert.text import check_batches, check_text, default_length, load_text, sample_batches, tokenize
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

Batches = dict[str, list[Tensor]]


@dataclass(frozen=True)
class Settings:
    """The options of `hf-qknorm demo`."""

    data: str | None = None
    checkpoint: str | None = None
    scheme: str = "qk_norm_cap"
    base_steps: int = 200
    steps: int = 60
    rate: float = 3e-4
    out: str = "./qknorm-demo"
    seed: int = 0


def run_demo(settings: Settings) -> dict[str, Any]:
    """Run the demo: print its progress and results, write the folder `settings.out`, and return the report.

    The folder is written whole or not at all. The folder of an earlier demo is replaced.

    Raises FileExistsError, before any work, if the folder has other files, the checkpoint or the text in it.
    """
    out = user_path(settings.out, "out")
    sources = [settings.checkpoint, settings.data]
    marker = (REPORT, "reloaded")
    check = partial(check_folder, out, overwrite=True, sources=sources, marker=marker, unknown=_unknown_files)
    check()
    scheme = Scheme.of(settings.scheme)
    check_text(settings.data)
    logging.getLogger("hf_qknorm").setLevel(logging.ERROR)  # the table that is printed has all that the log would say
    torch.manual_seed(settings.seed)
    tokenizer, batches, base = _prepare(settings, scheme)
    if settings.checkpoint is None:
        train(base, batches["base"], rate=2e-3, warmup=20, decay=True, desc="training a small Llama")
    schemes = {"unpatched": SCHEMES["none"], "fresh gains": scheme, "calibrated": scheme}
    models = {name: patch_model(copy.deepcopy(base), each) for name, each in schemes.items()}
    calibration = calibrate(models["calibrated"], batches["calibration"])
    from hf_qknorm.demo.run_plots import plot_logits, plot_losses  # imports matplotlib

    runs = {name: _continue_training(model, batches, settings, name) for name, model in models.items()}
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
            "reloaded": _reload(models["calibrated"], batches["held_out"][0], folder / MODEL),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }
        save_json(report, folder / REPORT)
    _print_results(report, calibration, out)
    return report


def _unknown_files(folder: Path) -> list[str]:
    """The files and folders that no demo writes."""
    found = [item.name for item in sorted(folder.iterdir()) if item.name not in WRITTEN]
    return found + ([f"{MODEL}/{name}" for name in unknown_files(folder / MODEL)] if (folder / MODEL).is_dir() else [])


def _prepare(settings: Settings, scheme: Scheme) -> tuple[Any, Batches, Any]:
    """Tokenizer, batches and model. Batches come first: too little text is found before a model is loaded."""
    if settings.checkpoint is None:
        tokenizer = byte_tokenizer()
        return tokenizer, _batches(tokenizer, settings, LENGTH), small_llama()
    with open_source(settings.checkpoint) as source:
        if isinstance(source.config, QKNormConfig):
            raise ValueError(
                f"{source.name} is converted already ({source.config.scheme}): give the original checkpoint"
            )
        family = family_of(source.config)
        require_causal(source.config)
        check_scheme(source.config.model_type, source.config, scheme.resolve(family.norm))
        tokenizer = load_tokenizer(source.folder)
        batches = _batches(tokenizer, settings, default_length(source.config))
        check_batches([{"input_ids": batch} for batch in batches["held_out"]], source.config)
        return tokenizer, batches, load_causal(source, torch.float32)


def _batches(tokenizer: Any, settings: Settings, length: int) -> Batches:
    text = load_text(settings.data)
    cut = int(len(text) * (1 - HELD_OUT))
    seen, held_out = tokenize(tokenizer, text[:cut]), tokenize(tokenizer, text[cut:])
    counts = {"base": settings.base_steps, "calibration": CALIBRATION_BATCHES, "continued": settings.steps}
    seeds = enumerate(counts.items(), start=settings.seed + 1)
    batches = {name: sample_batches(seen, count, BATCH, length, seed) for seed, (name, count) in seeds}
    return batches | {"held_out": sample_batches(held_out, EVAL_BATCHES, BATCH, length, settings.seed)}


def _continue_training(model: Any, batches: Batches, settings: Settings, name: str) -> dict[str, list[Any]]:
    """Train on the same batches as the other models, and measure held-out loss and logits every few steps."""
    run: dict[str, list[Any]] = {"held_out": [], "max_logit": [], "max_logit_by_head": []}
    every = max(settings.steps // 6, 1)

    def measure(step: int) -> None:
        if step % every and step != settings.steps:
            return
        with logit_statistics(model) as statistics:
            run["held_out"].append((step, mean_loss(model, batches["held_out"])))
        run["max_logit_by_head"] = [layer.max_logit.tolist() for layer in statistics.values()]
        run["max_logit"].append((step, max(map(max, run["max_logit_by_head"]))))

    train(model, batches["continued"], rate=settings.rate, desc=f"continuing: {name}", each_step=measure)
    return run


def _reload(model: Any, batch: Tensor, folder: Path) -> dict[str, Any]:
    """Load the saved checkpoint in a new process, and compare its logits with the model's."""
    with torch.no_grad():
        logits = model(input_ids=batch).logits
    with TemporaryDirectory(prefix="hf-qknorm-") as temporary, tqdm(total=1, desc="reloading in a new process") as bar:
        expected = Path(temporary, "expected.safetensors")
        save_file({"input_ids": batch, "logits": logits.contiguous()}, expected)
        command = [sys.executable, "-m", "hf_qknorm.demo.check_reload", str(folder), str(expected)]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        bar.update()
    if finished.returncode:
        raise RuntimeError(f"the saved checkpoint could not be loaded in a new process:\n{finished.stderr}")
    return json.loads(finished.stdout)


def _print_results(report: dict[str, Any], calibration: Calibration, out: Path) -> None:
    steps, reloaded = report["settings"]["steps"], report["reloaded"]
    print(f"\n{report['parameters']:,} parameters, scheme {report['settings']['scheme']}\n\ncalibrate(): {calibration}")
    print(f"\n{_largest_logits(calibration)}\n\non held-out text:\n")
    print(f"{'':14}{'loss at step 0':>16}{f'after {steps} steps':>16}{'max |logit| at 0':>18}{f'after {steps}':>10}")
    for name, run in report["runs"].items():
        (loss, last_loss), (logit, last_logit) = (
            (run[key][0][1], run[key][-1][1]) for key in ("held_out", "max_logit")
        )
        print(f"{name:14}{loss:16.3f}{last_loss:16.3f}{logit:18.1f}{last_logit:10.1f}")
    prompt = reloaded["prompt"].splitlines()[-1] if reloaded["prompt"] else ""
    print(f"\nreloaded in a new process as {reloaded['class']}: logits differ by {reloaded['largest_difference']:g}")
    print(f"it continues a text: {prompt}▸{reloaded['text']}\n\nwritten: {', '.join(str(out / n) for n in WRITTEN)}/")


def _largest_logits(calibration: Calibration) -> str:
    """The largest logits before and after the calibration, and their bound."""
    before, after = (
        max(max(getattr(layer, side).max_logit) for layer in calibration.layers.values())
        for side in ("before", "after")
    )
    text = f"largest |logit| in the calibration text: {before:.1f} unpatched, {after:.1f} calibrated"
    if calibration.bound is not None:
        text += f"; at most {calibration.bound:.1f} for any input, before any cap"
        if knee := calibration.scheme.knee:
            text += f"\nthe norms have a knee of {knee:g}: vectors below it keep their length, longer ones are bounded"
    return text
