"""The search for a knee: the smallest that keeps a model's predictions, with gains in closed form."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, Final

import torch
from transformers.utils import ModelOutput

from hf_qknorm.calibration.gains import ClosedFormGains
from hf_qknorm.files.log import logger
from hf_qknorm.measure.batches import Batches
from hf_qknorm.measure.predictions import output_error, predictions
from hf_qknorm.model.attention import evaluating, every_norm, patched_layers
from hf_qknorm.model.fold import is_exact
from hf_qknorm.reports.records import Prediction

KNEES: Final = (0.0, *(2.0 ** (i / 2) for i in range(-2, 11)))  # 0.5 to 32: a norm's shape holds powers of √2 exactly
SHARPNESS: Final = 8  # of the norms that a search sets
LIMIT: Final = 0.005  # nats per token that a conversion may cost by default
OUTPUT_LIMIT: Final = 0.05  # of the relative error of hidden states; vectors with it have a cosine above 0.998
EXPORT_KNEE: Final = 16.0  # of norms in RMSNorm's own form


def cost(base: Prediction, patched: Prediction) -> float:
    """The cost of a conversion in nats per token: the rise in loss, or the KL from the unpatched model if it is larger.

    On text that a model predicts badly, the loss may fall although its predictions drift.
    """
    return max(patched.loss - base.loss, patched.kl)


def with_margin(knee: float, knees: Sequence[float] = KNEES) -> float:
    """The next larger of these knees, in ascending order, or the largest: text of another kind has longer vectors.

    Without a knee there is nothing to add to.
    """
    return next((one for one in knees if one > knee), knees[-1]) if knee else knee


def search_knee(
    gains: ClosedFormGains, held_out: Batches, base: Prediction, max_cost: float | None, kept: list[ModelOutput]
) -> dict[float, Prediction]:
    """Set the knee `with_margin` over the smallest of `KNEES` whose cost on `held_out` is at most `max_cost` nats.

    Returns the predictions by knee. The cost falls as the knee grows, so the search bisects. The default is `LIMIT`. If
    every knee costs more than that, because of a cap for example, the largest one's cost is added to it. `kept` is as
    for `predictions`.

    Raises ValueError if every knee costs more than a given `max_cost`.
    """
    tried: dict[float, Prediction] = {}

    def predict() -> Prediction:
        own = predictions(gains.model, held_out, kept)[1]
        assert own is not None, "`base` is the other one"
        return own

    def cost_at(knee: float) -> float:
        if knee not in tried:
            gains.apply(knee)
            tried[knee] = predict()
        return cost(base, tried[knee])

    limit, largest = LIMIT if max_cost is None else max_cost, KNEES[-1]
    place = _place_of(limit, cost_at)
    if place == len(KNEES):
        least, seen = cost_at(largest), tried[largest]
        if not math.isfinite(least):
            raise ValueError(
                f"the loss with a knee of {largest:.3g} is {seen.loss:g} (unpatched {base.loss:g}), expected finite "
                "numbers: check the model's weights and dtype"
            )
        gains.apply(largest)
        remedy = _cheaper_cap(gains.model, limit, lambda: cost(base, predict()))
        costs = f"the knee {largest:.3g} costs {least:.4f} nats (loss {seen.loss:.4f} over {base.loss:.4f}, KL "
        costs += f"{seen.kl:.4f})"
        if max_cost is not None:
            raise ValueError(f"{costs}, more than max_loss_increase={max_cost:g}. {remedy}; or raise max_loss_increase")
        place = _place_of(least + limit, cost_at)
        logger.warning(
            "no knee costs less than %.4f nats: %s, for another part of the scheme. %s. The knee is set to %.3g, which "
            "adds little",
            limit, costs, remedy, with_margin(KNEES[place]),
        )  # fmt: skip
    chosen = with_margin(KNEES[place])
    cost_at(chosen)
    gains.apply(chosen)
    return dict(sorted(tried.items()))


def _cheaper_cap(model: Any, limit: float, cost_now: Callable[[], float]) -> str:
    """The advice for a scheme that costs more than `limit` at any knee: the least cap, of four, that costs less."""
    layers = patched_layers(model).values()
    cap = next(iter(layers)).scheme.softcap
    if cap is None:
        return "A norm on queries alone (q_norm) costs less"
    for wider in (*(cap * 2.0**i for i in range(1, 5)), None):
        schemes = [(layer, layer.scheme) for layer in layers]
        try:
            for layer, scheme in schemes:
                layer.scheme = replace(scheme, softcap=wider)
            found = cost_now()
        finally:
            for layer, scheme in schemes:
                layer.scheme = scheme
        if found <= limit:
            break
    name = "no cap (softcap=None)" if wider is None else f"softcap={wider:g}"
    return f"In place of the cap of {cap:g}, {name} costs {found:.4f}"


def search_outputs(gains: ClosedFormGains, held_out: Batches) -> None:
    """Set the knee of a model without predictions, by the relative error of its last hidden states.

    The knee is `with_margin` over the smallest of `KNEES` whose error on `held_out` is at most `OUTPUT_LIMIT`. Raises
    ValueError if every knee has a larger one.
    """

    @cache
    def error_at(knee: float) -> float:
        gains.apply(knee)
        return output_error(gains.model, held_out)

    place = _place_of(OUTPUT_LIMIT, error_at)
    if place == len(KNEES):
        raise ValueError(
            f"the knee {KNEES[-1]:.3g} changes the last hidden states by {error_at(KNEES[-1]):.1%}, more than "
            f"{OUTPUT_LIMIT:.0%}: another part of the scheme, such as its cap, does that. A higher or no cap changes "
            "less; or give a knee"
        )
    gains.apply(with_margin(KNEES[place]))


def _place_of(limit: float, cost_at: Callable[[float], float]) -> int:
    """The place of the smallest of `KNEES` that costs at most the limit, or their number."""
    return bisect_left(KNEES, True, key=lambda knee: cost_at(knee) <= limit)


@contextmanager
def tried_knees(
    model: Any, batches: Batches, knees: Sequence[float], kept: list[ModelOutput]
) -> Iterator[Callable[[float], tuple[Prediction, Prediction]]]:
    """Yield a function that sets one of `knees`, and returns the predictions unpatched and patched.

    Gains are closed-form, and norms as sharp as `calibrate` makes them. One pass over `batches` serves all knees;
    `kept` is as for `predictions`. The model is left as it was. Raises ValueError without a language-modelling head.
    """
    with restored_attention(model):
        gains = ClosedFormGains(model, batches, {}, knees, sharpness=SHARPNESS)

        def tried(knee: float) -> tuple[Prediction, Prediction]:
            gains.apply(knee)
            base, own = predictions(model, batches, kept)
            if base is None or own is None:
                raise ValueError(f"{type(model).__name__} predicts no tokens, and knees are compared by predictions")
            return base, own

        yield tried


@contextmanager
def restored_attention(model: Any, *, only_on_error: bool = False) -> Iterator[None]:
    """Restore all that a calibration changes on exit, or with `only_on_error` after an exception only.

    That is a patched model's norms, and the projections that a calibration scales. The model is in eval mode for the
    duration.
    """
    layers: list[Any] = [*patched_layers(model).values()]
    schemes = [(layer, layer.scheme) for layer in layers]
    eps = [(norm, norm.eps) for norm in every_norm(model)]
    tensors = [x for norm in every_norm(model) for x in (*norm.parameters(), norm.knee)]
    folded = [layer for layer in layers if layer.removed_norm]
    scaled = [] if not folded or is_exact(model) else folded
    spreads: list[tuple[Any, float]] = [(norm, norm.spread) for layer in scaled for norm in layer.removed_norm]
    tensors += [layer.get_submodule(part).weight for layer in scaled for part in layer.family.style.weights]
    values = [(x, x.detach().clone()) for x in tensors]
    restore = True
    with evaluating(model):
        try:
            yield
            restore = not only_on_error
        finally:
            if restore:
                for layer, scheme in schemes:
                    layer.scheme = scheme
                    layer.config.set_scheme(scheme)
                for norm, before in eps:
                    norm.eps = before
                for norm, before in spreads:
                    norm.spread = before
                with torch.no_grad():
                    for x, value in values:
                        x.copy_(value)
