"""The search for a knee: the smallest that keeps a model's predictions, with gains in closed form."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import torch

from hf_qknorm.convert.moments import Moments, moments, norm_sizes, norms_of
from hf_qknorm.model.knees import put_knee
from hf_qknorm.stats.distributed import Batches, reshard
from hf_qknorm.stats.measure import predictions
from hf_qknorm.stats.records import Prediction

logger = logging.getLogger(__name__)
T = TypeVar("T")

KNEES: Final = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
SHARE, LEAST = 0.01, 0.005  # the cost that is accepted by default: a share of fresh gains' cost, and nats at least


def cost(base: Prediction, own: Prediction) -> float:
    """The cost of a conversion, in nats a token: the rise in loss, or the KL from the unpatched model if that is more.

    On text that a model predicts badly the loss may fall while its predictions go astray.
    """
    return max(own.loss - base.loss, own.kl)


def tolerance(base: Prediction, fresh: Prediction) -> float:
    """The cost (nats) that is accepted by default, for the predictions unpatched and with fresh gains."""
    return max(SHARE * cost(base, fresh), LEAST)


def search(
    found: Moments, judged: Batches, base: Prediction, fresh: Prediction, most: float | None
) -> dict[float, Prediction]:
    """Put the smallest of `KNEES` in place that costs at most `most` (nats) on `judged`; predictions by knee tried.

    Larger knees keep more: the search halves. Where none keeps the predictions, as a cap may cost more, the knee is the
    smallest that does as well as the largest, within the tolerance.

    Raises ValueError where no knee costs as little as a `most` that is given.
    """
    tried: dict[float, Prediction] = {}

    def costs(knee: float) -> float:
        if knee not in tried:
            found.put(knee)
            tried[knee] = found.ranks.broadcast(predictions(found.model, judged)[1])
        return cost(base, tried[knee])

    limit = tolerance(base, fresh) if most is None else most
    chosen = _smallest(costs, limit)
    if chosen is None and most is not None:
        raise ValueError(
            f"the knee {KNEES[-1]:g} costs {costs(KNEES[-1]):.4f} nats (loss {tried[KNEES[-1]].loss:.4f} over "
            f"{base.loss:.4f}, KL {tried[KNEES[-1]].kl:.4f}), more than max_loss_increase={most:g}. A higher or no cap "
            "keeps more, as do queries alone (q_norm); or raise max_loss_increase"
        )
    if chosen is None:
        least = costs(KNEES[-1])
        chosen = _smallest(costs, least + limit)
        logger.warning(
            "no knee costs less than %.4f nats: %g costs %.4f (loss %.4f over %.4f). Other parts of the scheme, such "
            "as its cap, cost that much. The knee is %g, which costs hardly more",
            limit,
            KNEES[-1],
            least,
            tried[KNEES[-1]].loss,
            base.loss,
            chosen,
        )
    assert chosen is not None
    found.put(chosen)
    return dict(sorted(tried.items()))


def _smallest(costs: Callable[[float], float], limit: float) -> float | None:
    """The smallest of `KNEES` that costs up to `limit`, by halving; None if the largest costs more."""
    low, high = 0, len(KNEES)
    while low < high:
        middle = (low + high) // 2
        if costs(KNEES[middle]) <= limit:
            high = middle
        else:
            low = middle + 1
    return KNEES[low] if low < len(KNEES) else None


def sweep(
    model: Any, fitted: Batches, judged: Batches, measure: Callable[[], T], knees: Sequence[float] = KNEES
) -> dict[float, tuple[Prediction, T]]:
    """The predictions on `judged` and a measurement at each knee of a patched model, with gains by moments.

    One pass over `fitted` serves all of them. The model is left as it was. Raises ValueError for a model without a
    language-modelling head.
    """
    with restored(model):
        found = moments(model, fitted, norm_sizes(model, judged), knees)
        swept = {}
        for knee in knees:
            found.put(knee)
            own = predictions(model, judged)[1]
            if own is None:
                raise ValueError(f"{type(model).__name__} predicts no tokens, by which knees are compared")
            swept[knee] = (own, measure())
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
