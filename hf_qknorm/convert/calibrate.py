"""`calibrate`: gains that keep what a trained model knew, from what its queries, keys and values look like."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from hf_qknorm.attention import as_unpatched
from hf_qknorm.convert.fit import divergence, fit_gains
from hf_qknorm.convert.moments import fit_moments
from hf_qknorm.convert.text import as_batches
from hf_qknorm.hub.auto import QKNormModel
from hf_qknorm.norms import HeadNorm

METHODS = ("ones", "moments", "fit")
START_BATCHES = 16  # moments of these are a good enough start for a fit
LOSS_BATCHES = 8  # enough to see a jump; the gains themselves come from all the data


@dataclass(frozen=True)
class Calibration:
    """What a calibration did: mean next-token loss (nats) of the base, of fresh gains, and of the chosen ones.

    `kl` is what is left between the unpatched model's next-token distribution and the calibrated one's. All are over
    the first few batches, and None for a model without a language-modelling head.
    """

    method: str
    tokens: int
    base_loss: float | None
    fresh_loss: float | None
    loss: float | None
    kl: float | None

    @property
    def kept(self) -> float | None:
        """The share of the jump in loss that the calibration removed; None if there was no jump to remove."""
        if self.base_loss is None or self.fresh_loss is None or self.loss is None or self.fresh_loss <= self.base_loss:
            return None
        return (self.fresh_loss - self.loss) / (self.fresh_loss - self.base_loss)

    def __str__(self) -> str:
        if self.loss is None:
            return f"{self.method}: gains from {self.tokens:,} tokens"
        kept = "" if self.kept is None else f" ({self.kept:.0%} of the jump removed)"
        return (
            f"{self.method}: loss {self.base_loss:.3f} unpatched, {self.fresh_loss:.3f} with fresh gains, "
            f"{self.loss:.3f} calibrated on {self.tokens:,} tokens{kept}; KL {self.kl:.4f}"
        )


def calibrate(
    model: PreTrainedModel,
    data: Iterable[Any],
    method: str = "fit",
    *,
    tokenizer: Any = None,
    max_tokens: int = 262_144,
    batch_size: int = 8,
    length: int = 256,
    steps: int = 120,
) -> Calibration:
    """Set the gains (and biases) of a patched model from `data`, in place, and say what it bought.

    `data` is a list of strings, or an iterable of batches: tensors `[B, T]` or mappings with "input_ids" and perhaps
    "attention_mask" (padding is left out). Strings need a tokenizer, by default the one of `model.name_or_path`.

    "fit" trains the gains alone, for at most `steps` steps, to predict what the unpatched model does, from "moments"
    on. "moments" is the closed form: per channel, the least-squares fit of the model's own projection by its normalised
    self, x ≈ gain·norm(x) + bias, in one pass through the unpatched model. "ones" puts the fresh gains back.

    Raises ValueError for a model that is not patched, an unknown method, a fit of a model without a language-modelling
    head, or a scheme without the norm before attention.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}: expected one of {', '.join(METHODS)}")
    if not isinstance(model, QKNormModel):
        raise ValueError(f"{type(model).__name__} is not patched: call patch_model(model, scheme) first")
    if not model.config.scheme.pre_norm:
        raise ValueError("a scheme with pre_norm=False can't be calibrated: its projections no longer see normed input")
    if method == "fit" and model.get_output_embeddings() is None:
        raise ValueError(
            f'{type(model).__name__} predicts no tokens, which method="fit" compares: calibrate the causal language '
            'model, or use method="moments"'
        )
    if tokenizer is None and isinstance(data, str | list) and isinstance(data[0] if data else None, str):
        tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    batches = list(as_batches(data, tokenizer, batch=batch_size, length=length, max_tokens=max_tokens))
    training = model.training
    model.eval()
    try:
        with as_unpatched(model):
            base_loss = _loss(model, batches)
        for module in model.modules():
            if isinstance(module, HeadNorm):
                module.reset_parameters()
        fresh_loss = _loss(model, batches)
        if method != "ones":
            fit_moments(model, batches[:START_BATCHES] if method == "fit" else batches)
        if method == "fit":
            fit_gains(model, batches, steps=steps)
        loss = _loss(model, batches)
        kl = None if loss is None else divergence(model, batches[:LOSS_BATCHES])
    finally:
        model.train(training)
    return Calibration(method, sum(b["input_ids"].numel() for b in batches), base_loss, fresh_loss, loss, kl)


@torch.no_grad()
def _loss(model: Any, batches: list[dict[str, Tensor]]) -> float | None:
    if model.get_output_embeddings() is None:
        return None
    losses = []
    for batch in batches[:LOSS_BATCHES]:
        inputs = {key: value.to(model.device) for key, value in batch.items()}
        labels = inputs["input_ids"]
        if "attention_mask" in inputs:
            labels = labels.masked_fill(inputs["attention_mask"] == 0, -100)
        losses.append(float(model(**inputs, labels=labels, use_cache=False).loss))
    return sum(losses) / len(losses)
