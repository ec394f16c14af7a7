"""The demo's model, text and batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_qknorm.checkpoint import load_causal, load_tokenizer, open_source
from hf_qknorm.demo.progress import evaluation_work
from hf_qknorm.demo.training import BATCH, LENGTH, byte_tokenizer, small_llama
from hf_qknorm.families import check_scheme, family_of
from hf_qknorm.measure.predictions import require_causal
from hf_qknorm.measure.text import check_batches, default_length, load_text, sample_batches, tokenize
from hf_qknorm.model.configs import QKNormConfig
from hf_qknorm.scheme import Scheme

HELD_OUT = 0.1  # the last tenth of the text
HELD_OUT_BATCHES, CALIBRATION_BATCHES = 4, 8
LAYERS = 2  # of the small Llama
STEPS = 200  # of its continued training
RUN_BATCH = 4  # sequences in a batch of continued training
LOOKS = 8  # evaluations of a run after the first
CONVERSION = 4  # its work, with saving and reloading, equals training on the calibration text about this many times

Batches = dict[str, list[Tensor]]


@dataclass(frozen=True)
class Settings:
    """The options of `hf-qknorm demo`."""

    data: str | None = None
    checkpoint: str | None = None
    scheme: str = "qk_norm_cap"
    base_steps: int = 120
    steps: int | None = None  # 200 for the small Llama, and none for a checkpoint, which may be large
    rate: float = 1e-3
    out: str = "./qknorm-demo"
    seed: int = 0

    @property
    def continued_steps(self) -> int:
        """The number of steps of continued training."""
        return self.steps or (STEPS if self.checkpoint is None else 0)


def prepare(settings: Settings, scheme: Scheme) -> tuple[Any, Batches, Any]:
    """Tokenizer, batches and model. Batches come first: too little text is found before a model is loaded."""
    if settings.checkpoint is None:
        tokenizer = byte_tokenizer()
        return tokenizer, _batches(tokenizer, settings, LENGTH), small_llama(LAYERS)
    source = open_source(settings.checkpoint)
    if isinstance(source.config, QKNormConfig):
        raise ValueError(f"{source.name} is converted already ({source.config.scheme}): give the original checkpoint")
    family_of(source.config)  # raises for a type that is not supported
    require_causal(source.config)
    check_scheme(source.config.model_type, source.config, scheme.resolve())
    tokenizer = load_tokenizer(source.folder)
    batches = _batches(tokenizer, settings, default_length(source.config))
    check_batches([{"input_ids": batch} for batch in batches["held_out"]], source.config)
    return tokenizer, batches, load_causal(source, dtype=torch.float32)


def _batches(tokenizer: Any, settings: Settings, length: int) -> Batches:
    text = load_text(settings.data)
    cut = int(len(text) * (1 - HELD_OUT))
    seen, held_out = tokenize(tokenizer, text[:cut]), tokenize(tokenizer, text[cut:])
    sizes = {
        "base": (settings.base_steps, BATCH),
        "calibration": (CALIBRATION_BATCHES, BATCH),
        "continued": (settings.continued_steps, RUN_BATCH),
    }
    seeds = enumerate(sizes.items(), start=settings.seed + 1)
    batches = {name: sample_batches(seen, *size, length, seed) for seed, (name, size) in seeds}
    return batches | {"held_out": sample_batches(held_out, HELD_OUT_BATCHES, BATCH, length, settings.seed)}


def token_count(batches: list[Tensor]) -> int:
    return sum(batch.numel() for batch in batches)


def total_work(batches: Batches, *, trains_base: bool) -> int:
    """The length of the progress bar: all training, the conversion, and the evaluations of the four runs."""
    evaluations = (LOOKS + 1) * evaluation_work(token_count(batches["held_out"]))
    once = token_count(batches["base"]) * trains_base + CONVERSION * token_count(batches["calibration"])
    runs = 4 if batches["continued"] else 0
    return once + runs * (token_count(batches["continued"]) + evaluations)
