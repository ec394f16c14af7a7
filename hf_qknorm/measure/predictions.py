"""Predictions and attention statistics of a model over a few batches: the numbers in reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.utils import ModelOutput

from hf_qknorm.families.class_names import TYPE_PREFIX
from hf_qknorm.files.progress import progress_bar
from hf_qknorm.measure.batches import IGNORED, Batches, is_bidirectional, is_real, model_inputs, targets
from hf_qknorm.measure.bounds import norm_limits
from hf_qknorm.measure.logit_statistics import LogitStatistics, watched_layers
from hf_qknorm.measure.text import taken_inputs
from hf_qknorm.model.install import as_unpatched
from hf_qknorm.model.passes import PassFilter
from hf_qknorm.reports.records import LayerStatistics, Prediction

MOST_KEPT = 1_000_000_000


def require_causal(config: Any) -> None:
    """Raise ValueError for a model with bidirectional attention, which next-token losses say nothing about."""
    name = config.model_type.removeprefix(TYPE_PREFIX)
    if config.is_encoder_decoder:
        raise ValueError(
            f"{name} is an encoder-decoder, and models with one stack of layers are measured here: patch it with "
            "patch_model and train it, or take soft_cap, which needs no calibration"
        )
    if is_bidirectional(config):
        inputs = "with labels of masked tokens" if hasattr(config, "vocab_size") else "of images"
        raise ValueError(
            f"{name} has bidirectional attention and predicts no next token, which is measured here: calibrate(model, "
            f"batches) {inputs} calibrates it in memory"
        )


class Evaluation(NamedTuple):
    """A patched model's predictions and layers unpatched and patched; no predictions without a language-model head."""

    base: Prediction | None
    own: Prediction | None
    before: dict[str, LayerStatistics]
    after: dict[str, LayerStatistics]


def evaluate(model: Any, batches: Batches, cap: float, *, compared: bool = True) -> Evaluation:
    """Evaluate a patched model unpatched and patched, with two forward passes per batch; or patched alone, with one.

    Shares of large logits are relative to `cap`. Cross-attention that a decoder alone leaves out has no report.
    """
    now = False  # whether the pass is of the unpatched model
    first, second = PassFilter(lambda _: now), PassFilter(lambda _: not now)
    with watched_layers(model, first, cap) as before, watched_layers(model, second, cap) as after:

        def watch(is_unpatched: bool) -> None:
            nonlocal now
            now = is_unpatched

        base, own = _predictions(model, batches, watch, compared)
    limits = norm_limits(model)
    return Evaluation(
        base if compared else None,
        own,
        {name: layer_statistics(seen) for name, seen in before.items()},
        {name: layer_statistics(after[name], **limits[name]) for name in limits if name in after},
    )


def layer_statistics(seen: LogitStatistics, **others: Any) -> LayerStatistics:
    """The statistics as plain numbers, beside `others`."""
    by_head = ("max_logit", "entropy", "over_half", "over_cap")
    others |= {name: tuple(getattr(seen, name).tolist()) for name in by_head}
    return LayerStatistics(even=float(seen.even), **others)


def predictions(
    model: Any, batches: Batches, kept: list[ModelOutput] | None = None
) -> tuple[Prediction, Prediction] | tuple[None, None]:
    """The predictions of a patched model, unpatched and patched; None twice without a language-modelling head.

    The first call with a list `kept` adds the unpatched model's outputs for the first batches to it, up to `MOST_KEPT`
    bytes of logits; later calls on the same batches read them in place of a forward pass.
    """
    if model.get_output_embeddings() is None:
        return None, None
    return _predictions(model, batches, lambda is_unpatched: None, kept=kept)


@torch.no_grad()
def output_error(model: Any, batches: Batches) -> float:
    """The relative error of a patched model's last hidden states: ‖patched − unpatched‖ / ‖unpatched‖, all tokens."""
    sums = torch.zeros(2, dtype=torch.float64, device="cpu")
    for batch in batches:
        taken = taken_inputs(model.base_model, batch)
        inputs = {name: x for name, x in model_inputs(model, batch).items() if name in taken}
        own = model.base_model(**inputs, use_cache=False)
        with as_unpatched(model):
            base = model.base_model(**inputs, use_cache=False)
        own, base = (x.get("last_hidden_state", x[0]) for x in (own, base))  # a user's model may have logits alone
        real = is_real(batch).to(base.device) if "input_ids" in batch else slice(None)
        parts = (own.to(base.device) - base)[real], base[real]
        sums += torch.stack([part.double().square().sum() for part in parts]).cpu()
    return float((sums[0] / sums[1]).sqrt())


def loss_of(model: Any, batches: Batches) -> float:
    """The loss of a patched model in nats per token. Raises ValueError without a language-modelling head."""
    own, _ = _predictions(model, batches, lambda is_unpatched: None, compared=False)
    if own is None:
        raise ValueError(f"{type(model).__name__} predicts no tokens, and its loss can't be measured")
    return own.loss


@torch.no_grad()
def _predictions(
    model: Any,
    batches: Batches,
    watch: Callable[[bool], None],
    compared: bool = True,
    kept: list[ModelOutput] | None = None,
) -> tuple[Prediction, Prediction] | tuple[None, None]:
    """`predictions`, with a call of `watch(is_unpatched)` before each forward pass.

    If not `compared`, the patched model stands for both.
    """
    predicts = model.get_output_embeddings() is not None
    sums = torch.zeros(6, dtype=torch.float64, device="cpu")
    for place, batch in enumerate(progress_bar(batches, desc="measure", unit="batch")):
        inputs = model_inputs(model, batch)
        watch(False)
        base = own = model(**inputs, use_cache=False)
        if kept is not None and place < len(kept):
            base = kept[place]
        elif compared:
            watch(True)
            with as_unpatched(model):
                base = model(**inputs, use_cache=False)
            if kept is not None and place == len(kept) and sum(x.logits.nbytes for x in (*kept, base)) <= MOST_KEPT:
                kept.append(base)
        if predicts:
            wanted, real = targets(batch, model.config), is_real(batch)
            for row in range(len(real)):  # a whole batch's logits in fp32, twice, may be gigabytes
                sums += _row_sums(base.logits[row], own.logits[row], wanted[row], real[row])
    if not predicts:
        return None, None
    base_nll, own_nll, predicted, kl, same, tokens = sums.tolist()
    if not predicted:
        raise ValueError("no token of the data has a successor to predict: give longer sequences")
    return Prediction(base_nll / predicted), Prediction(own_nll / predicted, max(kl / tokens, 0.0), same / tokens)


def _row_sums(base: Tensor, own: Tensor, wanted: Tensor, real: Tensor) -> Tensor:
    """Of one sequence: the sums of both losses, targets, KL, agreements and tokens; logits `[T, V]`, others `[T]`."""
    wanted, real = wanted.to(base.device), real.to(base.device)
    p = F.log_softmax(base.float(), -1)
    q = p if own is base else F.log_softmax(own.to(base.device).float(), -1)
    chosen, predicts = wanted.clamp_min(0)[:, None], wanted != IGNORED
    base_nll, own_nll = (-x.gather(-1, chosen).squeeze(-1)[predicts].sum() for x in (p, q))
    kl = F.kl_div(q, p, log_target=True, reduction="none").sum(-1)[real].sum()
    same = (p.argmax(-1) == q.argmax(-1))[real].sum()
    return torch.stack([base_nll, own_nll, predicts.sum(), kl, same, real.sum()]).double().cpu()
