"""`calibrate`: gains that keep what a trained model knew, from what its queries, keys and values look like."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PreTrainedModel

from hf_qknorm.attention import NORM_NAMES, QKNormAttention, as_unpatched, patched_layers
from hf_qknorm.convert.text import as_batches
from hf_qknorm.hub.auto import QKNormModel
from hf_qknorm.norms import HeadNorm
from hf_qknorm.ops.reference import head_norm

METHODS = ("ones", "moments")
LOSS_BATCHES = 8  # enough to see a jump; the gains themselves come from all the data


@dataclass(frozen=True)
class Calibration:
    """What a calibration did: mean next-token loss (nats) of the base, of fresh gains, and of the chosen ones.

    The losses are over the first few batches, and None for a model without a language-modelling head.
    """

    method: str
    tokens: int
    base_loss: float | None
    fresh_loss: float | None
    loss: float | None

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
            f"{self.loss:.3f} calibrated on {self.tokens:,} tokens{kept}"
        )


def calibrate(
    model: PreTrainedModel,
    data: Iterable[Any],
    method: str = "moments",
    *,
    tokenizer: Any = None,
    max_tokens: int = 65_536,
    batch_size: int = 8,
    length: int = 256,
) -> Calibration:
    """Set the gains (and biases) of a patched model from `data`, in place, and say what it bought.

    `data` is a list of strings, or an iterable of batches: tensors `[B, T]` or mappings with "input_ids" and perhaps
    "attention_mask" (padding is left out). Strings need a tokenizer, by default the one of `model.name_or_path`.

    "ones" puts the fresh gains back. "moments" is the closed form: per channel, the least-squares fit of the model's
    own projection by its normalised self, x ≈ gain·norm(x) + bias, over all tokens, through the unpatched model.

    Raises ValueError for a model that is not patched, an unknown method, or a scheme without the norm before attention.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}: expected one of {', '.join(METHODS)}")
    if not isinstance(model, QKNormModel):
        raise ValueError(f"{type(model).__name__} is not patched: call patch_model(model, scheme) first")
    if not model.config.scheme.pre_norm:
        raise ValueError("a scheme with pre_norm=False can't be calibrated: its projections no longer see normed input")
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
        if method == "moments":
            _fit_moments(model, batches)
        loss = _loss(model, batches) if method != "ones" else fresh_loss
    finally:
        model.train(training)
    return Calibration(method, sum(b["input_ids"].numel() for b in batches), base_loss, fresh_loss, loss)


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


class _Moments:
    """Sums over tokens of n², n·x, n, x and 1, per head and channel `[H, D]` in fp64, of inputs x and their norms n."""

    def __init__(self, norm: HeadNorm) -> None:
        self.norm = norm
        self.sums = [torch.zeros((), dtype=torch.float64)] * 5
        self.valid: Tensor | None = None

    def __call__(self, module: HeadNorm, args: tuple[Tensor, ...]) -> None:
        x = args[0].detach().flatten(0, 1)
        if self.valid is not None:
            x = x[self.valid.to(x.device).flatten()]
        x = x.float() if x.device.type == "mps" else x.double()
        n = head_norm(x, module.norm, eps=module.eps, p=module.p)
        new = (n * n, n * x, n, x, torch.ones_like(x))
        self.sums = [old + y.sum(0).cpu().double() for old, y in zip(self.sums, new, strict=True)]

    def solve(self, shape: torch.Size, bias: bool) -> tuple[Tensor, Tensor]:
        """The least-squares gain and bias of x ≈ gain·n + bias, for a gain of `shape`: `[H, D]`, `[D]` or `[1]`."""
        pooled = {2: (), 1: (0,) if shape[0] == self.sums[0].shape[1] else (0, 1)}[len(shape)]
        nn, nx, n, x, count = (s.sum(pooled, keepdim=True) if pooled else s for s in self.sums)
        if bias:
            nn, nx = nn - n * n / count, nx - n * x / count
        gain = torch.where(nn > 0, nx / nn.clamp_min(torch.finfo(nn.dtype).tiny), 1.0)
        offset = (x - gain * n) / count if bias else torch.zeros_like(gain)
        return gain.reshape(shape), offset.reshape(shape)


@torch.no_grad()
def _fit_moments(model: Any, batches: list[dict[str, Tensor]]) -> None:
    layers = patched_layers(model)
    moments: dict[tuple[str, str], _Moments] = {}
    hooks = []
    for layer_name, layer in layers.items():
        for field, name in NORM_NAMES.items():
            norm = layer._modules.get(name)
            if isinstance(norm, HeadNorm):
                moments[layer_name, field] = _Moments(norm)
                hooks.append(norm.register_forward_pre_hook(moments[layer_name, field]))
    try:
        with as_unpatched(model):
            for batch in tqdm(batches, desc="moments", unit="batch", leave=False):
                for moment in moments.values():
                    mask = batch.get("attention_mask")
                    moment.valid = None if mask is None else mask.bool()
                model(**{key: value.to(model.device) for key, value in batch.items()}, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    for layer_name, layer in layers.items():
        _set_gains(layer, {field: moments[layer_name, field] for field in NORM_NAMES if (layer_name, field) in moments})


def _set_gains(layer: QKNormAttention, moments: dict[str, _Moments]) -> None:
    """Write the fitted gains; q's also makes up for a changed scale, and for keys that are normed without a gain."""
    for field, moment in moments.items():
        norm = moment.norm
        if norm.weight is None:
            continue
        gain, bias = moment.solve(norm.weight.shape, norm.bias is not None)
        factor = 1.0
        if field == "q" or (field == "k" and "q" not in moments):
            factor = layer.scaling / layer.logit_scale
        if field == "q" and "k" in moments and moments["k"].norm.weight is None:
            factor *= float(moments["k"].solve(torch.Size((1,)), bias=False)[0])
        norm.weight.copy_(gain * factor)
        if norm.bias is not None:
            norm.bias.copy_(bias * factor)
