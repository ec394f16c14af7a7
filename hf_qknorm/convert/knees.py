"""The search for a knee: the smallest that keeps a model's predictions, with gains in closed form."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import torch

from hf_qknorm.convert.measure import Batches, mean_loss
from hf_qknorm.convert.moments import Moments, moments, norm_sizes, norms_of
from hf_qknorm.convert.ranks import reshard
from hf_qknorm.knee import put_knee

logger = logging.getLogger(__name__)
T = TypeVar("T")

KNEES: Final = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
SHARE, LEAST = 0.01, 0.005  # of the naive jump, and in nats: the rise in loss that a knee may leave by default


def tolerance(base: float, fresh: float) -> float:
    """The rise in loss (nats) that is accepted by default, for the losses unpatched and with fresh gains."""
    return max(SHARE * (fresh - base), LEAST)


def search(found: Moments, judged: Batches, base: float, fresh: float, most: float | None) -> dict[float, float]:
    """Put the smallest of `KNEES` in place whose loss on `judged` is at most `most` above `base`; losses by knee tried.

    Larger knees keep more: the search halves. Where none keeps the loss, as a cap may cost more, the knee is the
    smallest that does as well as the largest, within the tolerance.

    Raises ValueError where no knee keeps the loss within a `most` that is given.
    """
    losses: dict[float, float] = {}

    def loss(knee: float) -> float:
        if knee not in losses:
            found.put(knee)
            losses[knee] = found.ranks.first(mean_loss(found.model, judged))
        return losses[knee]

    allowed = tolerance(base, fresh) if most is None else most
    limit = base + allowed
    chosen = _smallest(loss, limit)
    if chosen is None and most is not None:
        best = min(losses.values())
        raise ValueError(
            f"the knee {KNEES[-1]:g} leaves a loss of {best:.4f}, {best - base:.4f} nats above the unpatched model's, "
            f"more than max_loss_increase={most:g}. A higher or no cap keeps more, as does "
            "queries alone (q_norm); or raise max_loss_increase"
        )
    if chosen is None:
        limit = losses[KNEES[-1]] + allowed
        chosen = _smallest(loss, limit)
        logger.warning(
            "no knee keeps the loss within %.4f nats of the unpatched model's (%.4f; %.4f with a knee of %g): the "
            "scheme's other parts cost the rest. The knee %g comes as close",
            allowed,
            base,
            losses[KNEES[-1]],
            KNEES[-1],
            chosen,
        )
    assert chosen is not None
    found.put(chosen)
    return dict(sorted(losses.items()))


def _smallest(loss: Callable[[float], float], limit: float) -> float | None:
    """The smallest of `KNEES` with a loss up to `limit`, by halving; None if the largest has more."""
    low, high = 0, len(KNEES)
    while low < high:
        middle = (low + high) // 2
        if loss(KNEES[middle]) <= limit:
            high = middle
        else:
            low = middle + 1
    return KNEES[low] if low < len(KNEES) else None


def sweep(
    model: Any, fitted: Batches, judged: Batches, measure: Callable[[], T], knees: Sequence[float] = KNEES
) -> dict[float, tuple[float, T]]:
    """The loss (nats) on `judged` and a measurement at each knee of a patched model, with gains by moments.

    One pass over `fitted` serves all of them. The model is left as it was.
    """
    with restored(model):
        found = moments(model, fitted, norm_sizes(model, judged), knees)
        swept = {}
        for knee in knees:
            found.put(knee)
            swept[knee] = (mean_loss(model, judged), measure())
    return swept


@contextmanager
def restored(model: Any, *, always: bool = True) -> Iterator[None]:
    """Put a patched model's norms and knee back afterwards; with `always=False` only where an exception comes."""
    reshard(model)
    scheme, norms = model.config.scheme, norms_of(model)
    powers = {key: norm.power if norm.knee else 1.0 for key, norm in norms.items()}
    values = [(p, p.detach().clone()) for norm in norms.values() for p in norm.parameters()]
    try:
        yield
    except BaseException:
        always = True
        raise
    finally:
        if always:
            reshard(model)
            put_knee(model, scheme.knee, powers)
            with torch.no_grad():
                for parameter, value in values:
                    parameter.copy_(value)
