"""The knee of a calibration: its default, and the search for the smallest that keeps a model's predictions."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, Final, Literal

from transformers.utils import ModelOutput

from hf_qknorm.calibration.gains import ClosedFormGains
from hf_qknorm.files.formatting import shorten
from hf_qknorm.files.log import logger
from hf_qknorm.measure.batches import Batches
from hf_qknorm.measure.predictions import output_error, predictions
from hf_qknorm.model.attention import evaluating, every_norm, patched_layers
from hf_qknorm.model.fold import is_exact
from hf_qknorm.model.rollback import undone_on_error
from hf_qknorm.reports.records import Prediction
from hf_qknorm.scheme import Scheme

KNEES: Final = (0.0, *(2.0 ** (i / 2) for i in range(-2, 11)))  # 0.5 to 32: a norm's shape holds powers of √2 exactly
SHARPNESS: Final = 8  # of the norms that a search sets
LIMIT: Final = 0.005  # nats per token that a conversion may cost by default
OUTPUT_LIMIT: Final = 0.05  # of the relative error of hidden states; vectors with it have a cosine above 0.998
EXPORT_KNEE: Final = 16.0  # of norms in RMSNorm's own form

Knee = float | Literal["auto"]


def resolve_knee(scheme: Scheme, knee: Knee | None, max_loss_increase: float | None, exportable: bool) -> Knee:
    """The knee of a calibration, with the default in place of None.

    Raises ValueError for a knee that the scheme can't have, and a limit that is not finite.
    """
    if max_loss_increase is not None and not math.isfinite(max_loss_increase):
        raise ValueError(f"max_loss_increase={max_loss_increase} is no limit: expected a finite number, or None")
    if knee is not None and knee != "auto" and (isinstance(knee, str) or not 0 <= knee < math.inf):
        raise ValueError(f'knee={shorten(knee)}: expected a number ≥ 0, "auto", or None')
    if exportable:
        knee = EXPORT_KNEE if knee is None else knee
        if isinstance(knee, str) or not knee:
            raise ValueError(f"knee={knee} is not exportable: expected a number above 0, as knee={EXPORT_KNEE:g}")
    possible = bool(scheme.norms) and scheme.pre_norm
    if knee is None:
        return "auto" if possible and scheme.gain != "none" else 0.0
    if knee and not possible:
        raise ValueError(
            f"knee={knee}: expected 0 unless q, k or v is normed and pre_norm is True: a norm with a knee keeps part "
            "of the scale"
        )
    return knee


def resolve_sharpness(sharpness: float | None, knee: Knee, exportable: bool) -> float:
    """The sharpness of a calibration, by default by its knee. Raises ValueError for one that is not possible."""
    if sharpness is None:
        return float(SHARPNESS if isinstance(knee, str) else 1)
    if not 1 <= sharpness < math.inf or (exportable and sharpness != 1):
        raise ValueError(f"sharpness={sharpness}: expected {'1 with exportable' if exportable else 'a number ≥ 1'}")
    return float(sharpness)


def cost(base: Prediction, patched: Prediction) -> float:
    """The cost of a conversion in nats per token: the rise in loss, or the KL from the unpatched model if it is larger.

    On text that a model predicts badly, the loss may fall although its predictions drift.
    """
    return max(patched.loss - base.loss, patched.kl)


def with_margin(knee: float) -> float:
    """The next larger of `KNEES`, or the largest, as text of another kind has longer vectors; 0 without a knee."""
    return next((one for one in KNEES if one > knee), KNEES[-1]) if knee else knee


def search_knee(
    gains: ClosedFormGains, held_out: Batches, base: Prediction | None, limit: float | None, kept: list[ModelOutput]
) -> dict[float, Prediction]:
    """Set the knee `with_margin` over the smallest of `KNEES` whose cost on `held_out` is at most `limit` nats.

    Returns the predictions by knee. The cost falls as the knee grows, so the search bisects. The default is `LIMIT`. If
    every knee costs more than that, because of a cap for example, the largest one's cost is added to it, with a
    warning. A model without predictions, of which `base` is None, is judged by its `output_error`. `kept` is as for
    `predictions`.

    Raises ValueError for a cost that is not finite, and if every knee costs more than a given limit or `OUTPUT_LIMIT`.
    """
    tried: dict[float, Prediction] = {}
    effect, remedy = "costs {:.4f} nats per token", None if limit is None else "raise max_loss_increase"
    most = LIMIT if limit is None else limit
    if base is None:
        most, effect, remedy = OUTPUT_LIMIT, "changes the last hidden states by {:.1%}", "give a knee"

    def now(knee: float | None = None) -> float:
        if base is None:
            return output_error(gains.model, held_out)
        own = predictions(gains.model, held_out, kept)[1]
        assert own is not None
        if knee is not None:
            tried[knee] = own
        return cost(base, own)

    @cache
    def cost_at(knee: float) -> float:
        gains.apply(knee)
        return now(knee)

    def place_of(most: float) -> int:
        return bisect_left(KNEES, True, key=lambda knee: cost_at(knee) <= most)

    place = place_of(most)
    if place == len(KNEES):
        least = cost_at(KNEES[-1])
        found = f"the knee {KNEES[-1]:.3g} {effect.format(least)}"
        if not math.isfinite(least):
            raise ValueError(f"{found}, expected a finite number: check the model's weights and dtype")
        gains.apply(KNEES[-1])
        allowed = f"the limit of {most:g}" if limit is None else f"max_loss_increase={most:g}"
        found += f", more than {allowed}, by another part of the scheme: {_cheaper_cap(gains.model, most, now, effect)}"
        if remedy is not None:
            raise ValueError(f"{found}; or {remedy}")
        place = place_of(least + most)
        logger.warning(f"{found}. The knee is set to {with_margin(KNEES[place]):.3g}, which adds little")
    chosen = with_margin(KNEES[place])
    cost_at(chosen)
    gains.apply(chosen)
    return dict(sorted(tried.items()))


def _cheaper_cap(model: Any, most: float, cost_now: Callable[[], float], effect: str) -> str:
    """The advice for a scheme that costs more than `most` at any knee: the least of four wider caps that does not."""
    layers, scheme = patched_layers(model).values(), model.config.scheme
    if scheme.softcap is None:
        return "a norm on queries alone (q_norm) changes less"
    try:
        for cap in (*(scheme.softcap * 2**i for i in range(1, 5)), None):
            for layer in layers:
                layer.scheme = replace(layer.scheme, softcap=cap)
            if (found := cost_now()) <= most:
                break
    finally:
        for layer in layers:
            layer.scheme = replace(layer.scheme, softcap=scheme.softcap)
    name = "no cap (softcap=None)" if cap is None else f"softcap={cap:g}"
    return f"in place of the cap of {scheme.softcap:g}, {name} {effect.format(found)}"


@contextmanager
def undone_calibration(model: Any) -> Iterator[None]:
    """Eval mode for the duration; any exception leaves a patched model as it was.

    That is its norms, and the projections behind folded norms that a calibration scales.
    """
    with evaluating(model), undone_on_error(model) as keep:
        for norm in every_norm(model):
            for tensor in (*norm.parameters(), norm.knee):
                keep(tensor)
        folded = [layer for layer in patched_layers(model).values() if layer.removed_norm]
        for layer in folded if folded and not is_exact(model) else ():  # of an offloaded model biases can't be read
            for part in layer.family.style.weights:
                projection: Any = layer.get_submodule(part)
                keep(projection.weight)
        yield
