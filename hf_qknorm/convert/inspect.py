"""`inspect_model`: how a model's attention looks, head by head, and which scheme suits it, before one is chosen."""

from __future__ import annotations

import dataclasses
import logging
import math
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_qknorm.checkpoint.source import open_source
from hf_qknorm.convert.advice import Advice, KneeTrials, Risk, Situation, advise, name_of, rank
from hf_qknorm.convert.calibrate import length_for, tokenizer_of
from hf_qknorm.convert.memory import SEQUENCES, memory_left, place_weights
from hf_qknorm.convert.pretrained import load_causal, load_tokenizer
from hf_qknorm.convert.text import CHARACTERS, as_batches, check_batches, check_text, load_text, tokenize
from hf_qknorm.convert.trials import try_knees, try_schemes
from hf_qknorm.families import family_of
from hf_qknorm.model.attention import QKNormAttention, patched_layers
from hf_qknorm.model.configs import QKNormConfig
from hf_qknorm.model.derived import QKNormModel
from hf_qknorm.patch import patch_model, unpatch_model
from hf_qknorm.scheme import SCHEMES, Scheme
from hf_qknorm.stats.bounds import logit_bound
from hf_qknorm.stats.distributed import Batches
from hf_qknorm.stats.logit_statistics import CAP
from hf_qknorm.stats.measure import layer_statistics, predictions, require_causal
from hf_qknorm.stats.records import FORMAT, LayerStatistics, Prediction, predictions_table
from hf_qknorm.stats.report import save_json
from hf_qknorm.stats.tables import READING, ROWS, aligned, bound_cell, mean, over_names, pair_of_means, rest

WIDTH = 100  # of the advice, in characters


@dataclass(frozen=True)
class Inspection:
    """What an inspection found: `layers` by name, `risks` with the worst layer first, and the `advice`.

    `base` predicts as the unpatched model does, `patched` as a patched one does now (else None). `trials` are schemes
    put on for a moment, with fresh gains: what they cost before any calibration. `knees` has the loss and the bound at
    each knee that `calibrate` tries (None for a model that is patched, takes no norms, or predicts no tokens). `scheme`
    is what the model is patched with, and `bounds` the largest |logit| that any input can give, by layer, where norms
    bound it. Shares of large logits are relative to `cap`; `even` is the entropy (nats) of even attention by layer.
    """

    model: str
    model_type: str
    tokens: int
    length: int
    cap: float
    scheme: Scheme | None
    base: Prediction | None
    patched: Prediction | None
    trials: Mapping[Scheme, Prediction]
    layers: Mapping[str, LayerStatistics]
    even: Mapping[str, float]
    risks: tuple[Risk, ...]
    advice: Advice
    knees: KneeTrials | None = None
    bounds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def largest(self) -> float:
        """The largest |logit| of all heads."""
        return self.risks[0].max_logit

    @property
    def keeps(self) -> bool:
        """Whether the advice is to leave the model as it is."""
        return self.advice.scheme == (self.scheme or SCHEMES["none"])

    def table(self) -> str:
        """What was measured, the layers at the greatest risk, and the advice: a page of text."""
        heads = len(next(iter(self.layers.values())).max_logit)
        state = "unpatched" if self.scheme is None else str(self.scheme)
        title = (
            f"{self.model}: {self.model_type}, {len(self.layers)} layers of {heads} heads, {state}; "
            f"{self.tokens:,} tokens in sequences of up to {self.length}"
        )
        named = {"unpatched": self.base, "as it is": self.patched}
        named |= {name_of(scheme) + (", fresh gains" if scheme.norms else ""): p for scheme, p in self.trials.items()}
        measured = predictions_table({name: p for name, p in named.items() if p is not None})
        bounded = ["bound"] if self.bounds else []
        beyond = ["beyond q, k"] if self.scheme is not None and self.scheme.knee else []
        rows = [["layer", "", "max |logit|", "head", "entropy", "head", *over_names(self.cap), "rms q", "rms k"]]
        rows[0] += bounded + beyond
        for risk in self.risks[:ROWS]:
            layer = self.layers[risk.layer]
            logit = [f"{risk.max_logit:.1f}", str(risk.max_head), f"{risk.entropy:.2f}", str(risk.entropy_head)]
            shares = [f"{mean(share):.2%}" for share in (layer.over_half, layer.over_cap)]
            rows.append(
                [risk.layer, risk.level, *logit, *shares, f"{mean(layer.rms_q):.3g}", f"{mean(layer.rms_k):.3g}"]
            )
            rows[-1] += [bound_cell(self.bounds.get(risk.layer))] * len(bounded)
            rows[-1] += [pair_of_means(layer.beyond_q, layer.beyond_k, ".2%")] * len(beyond)
        layers = aligned(rows) + rest(len(self.risks))
        parts = (title, measured, self._knees(), layers, READING, self._advice())
        return "\n\n".join(part for part in parts if part)

    def _knees(self) -> str:
        if self.knees is None:
            return ""
        rows = [["knee", "loss rises by", "KL", "bound on |logit|", ""]]
        for trial in self.knees.trials:
            mark = f"← the smallest that costs at most {self.knees.limit:.3f}" if trial is self.knees.chosen else ""
            rows.append([f"{trial.knee:g}", f"{trial.rise:+.3f}", f"{trial.kl:.3f}", bound_cell(trial.bound), mark])
        return (
            f"{name_of(self.knees.scheme)}, calibrated in one pass over half of the text and judged on the other, by "
            f"knee\n(largest |logit| seen unpatched: {self.largest:.1f}; fresh gains and no knee: "
            f"{self.knees.jump:+.3f}):\n\n{aligned(rows)}"
        )

    def _advice(self) -> str:
        lines = [f"Advice: {'leave it as it is' if self.keeps else self.advice.name}"]
        for reason in self.advice.reasons:
            lines += textwrap.wrap(reason, WIDTH, initial_indent="  - ", subsequent_indent="    ")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON-ready data."""
        return {
            "format": FORMAT,
            "model": self.model,
            "model_type": self.model_type,
            "tokens": self.tokens,
            "length": self.length,
            "cap": self.cap,
            "scheme": None if self.scheme is None else self.scheme.to_dict(),
            "base": None if self.base is None else self.base.to_dict(),
            "patched": None if self.patched is None else self.patched.to_dict(),
            "trials": [{"scheme": scheme.to_dict(), **p.to_dict()} for scheme, p in self.trials.items()],
            "knees": None if self.knees is None else self.knees.to_dict(),
            "layers": {name: layer.to_dict() for name, layer in self.layers.items()},
            "even": dict(self.even),
            "bounds": dict(self.bounds),
            "risks": [risk.to_dict() for risk in self.risks],
            "advice": self.advice.to_dict(),
        }

    def save(self, path: str | Path) -> None:
        """Write it as JSON, whole or not at all."""
        save_json(self.to_dict(), Path(path))


def inspect_model(
    model: PreTrainedModel,
    data: Any,
    *,
    tokenizer: Any = None,
    max_tokens: int = 16_384,
    batch_size: int = 8,
    length: int | None = None,
    cap: float | None = None,
) -> Inspection:
    """Measure the attention of a model, patched or not, on `data` (as for `calibrate`), and say what suits it.

    The model is left as it was. Logits are held against `cap`, by default the model's own cap, or 50. An unpatched
    model is also measured with the schemes in question put on for a moment, and with the knees that `calibrate` tries.

    Raises ValueError for a model that can't be patched, data with hardly a token to predict, a cap that is not > 0, or
    logits that are not finite.
    """
    _check_cap(cap)
    require_causal(model.config)
    load = partial(tokenizer_of, model) if tokenizer is None else lambda: tokenizer
    length = length or length_for(model.config)
    batches = list(as_batches(data, load, batch=batch_size, length=length, max_tokens=max_tokens))
    check_batches(batches, model.config)
    scheme = model.config.scheme if isinstance(model, QKNormModel) else None
    training = model.training
    model.eval()
    try:
        with _quiet():
            with _watchable(model):
                situation = _situation(model, batches, cap)
                base, now = predictions(model, batches)
                bounds = {name: logit_bound(layer) for name, layer in patched_layers(model).items()}
            if scheme is None and base is not None:
                situation = dataclasses.replace(situation, trials=try_schemes(model, batches, situation))
                situation = dataclasses.replace(situation, knees=try_knees(model, batches, situation))
    finally:
        model.train(training)
    return Inspection(
        model=model.name_or_path or type(model).__name__,
        model_type=model.config.model_type,
        tokens=sum(batch["input_ids"].numel() for batch in batches),
        length=max(batch["input_ids"].shape[1] for batch in batches),
        cap=situation.cap,
        scheme=scheme,
        base=base,
        patched=None if scheme is None else now,
        trials=situation.trials,
        layers=situation.layers,
        even=situation.even,
        risks=rank(situation),
        advice=advise(situation),
        knees=situation.knees,
        bounds={name: bound for name, bound in bounds.items() if bound is not None},
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the log lines of patching: it is undone before anyone could act on them."""
    logger = logging.getLogger("hf_qknorm")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _watchable(model: PreTrainedModel) -> Iterator[None]:
    """An unpatched model is patched with "none" meanwhile, with the attention that forms no T×S mask."""
    if isinstance(model, QKNormModel):
        yield
        return
    patch_model(model, "none", attn_implementation="hf_qknorm")
    try:
        yield
    finally:
        unpatch_model(model)


def _situation(model: Any, batches: Batches, cap: float | None) -> Situation:
    layers = patched_layers(model)
    first, scheme = next(iter(layers.values())), model.config.scheme
    cap = cap or first.softcap or CAP
    found = layer_statistics(model, batches, cap)
    for name, layer in found.items():
        if not all(map(math.isfinite, (*layer.max_logit, *layer.entropy))):
            raise ValueError(f"the attention logits of {name} are not finite in {model.dtype}: load it in float32")
    even = {name: _even_entropy(layer, batches) for name, layer in layers.items()}
    normed = first.has_own_norms or None not in (scheme.q, scheme.k)
    return Situation(found, cap, even, scheme, normed, first.softcap)


def _even_entropy(layer: QKNormAttention, batches: Batches) -> float:
    """The mean entropy of causal attention that is the same for all tokens in sight, in nats."""
    total, count = 0.0, 0
    for batch in batches:
        ids = batch["input_ids"]
        for length in batch.get("attention_mask", torch.ones_like(ids)).sum(-1).tolist():
            seen = torch.arange(1, int(length) + 1).clamp_max(layer.window or int(length))
            total, count = total + float(seen.double().log().sum()), count + int(length)
    return total / max(count, 1)


def inspect_checkpoint(
    checkpoint: str, *, texts: str | None = None, tokens: int = 16_384, cap: float | None = None
) -> Inspection:
    """`inspect_model` of a checkpoint (a folder or a Hub name) on `texts` as `load_text` takes them.

    Of a checkpoint that does not fit into memory, the layers are read from the disk in each forward pass.

    Raises FileNotFoundError for a folder or a text that is not there, OSError without a tokenizer, and ValueError for
    weights that are pickled, no causal language model's, or broken, for a model that is not supported, and for a cap or
    a text that nothing can be judged by; all before the weights are read.
    """
    _check_cap(cap)
    check_text(texts)
    with open_source(checkpoint) as source:
        if not isinstance(source.config, QKNormConfig):
            family_of(source.config)
        require_causal(source.config)
        tokenizer = load_tokenizer(source.folder)
        ids = tokenize(tokenizer, load_text(texts, limit=CHARACTERS * tokens))[:tokens]
        check_batches([{"input_ids": ids[None]}], source.config)
        scratch = Path(tempfile.gettempdir(), source.folder.name)
        with place_weights(source, length_for(source.config), memory_left(None), scratch) as placement:
            model = load_causal(source, "auto", **placement.options)
            return inspect_model(
                model, [{"input_ids": ids}], max_tokens=tokens, cap=cap, batch_size=placement.sequences or SEQUENCES
            )


def _check_cap(cap: float | None) -> None:
    if cap is not None and not (math.isfinite(cap) and cap > 0):
        raise ValueError(f"cap={cap!r} is not possible: expected a finite number > 0")
