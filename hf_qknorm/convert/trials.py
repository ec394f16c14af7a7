"""The cost of schemes and knees, put on an unpatched model for a moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from transformers import PreTrainedModel

from hf_qknorm.convert.advice import KneeTrial, KneeTrials, Situation, scheme_for_knees, wide_cap
from hf_qknorm.convert.knees import sweep, tolerance
from hf_qknorm.families import family_of
from hf_qknorm.patch import patch_model, unpatch_model
from hf_qknorm.scheme import SCHEMES, Scheme
from hf_qknorm.stats.bounds import worst_bound
from hf_qknorm.stats.distributed import Batches
from hf_qknorm.stats.measure import predictions
from hf_qknorm.stats.records import Prediction


def try_schemes(model: PreTrainedModel, batches: Batches, situation: Situation) -> dict[Scheme, Prediction]:
    """The cost of the schemes in question, put on an unpatched model one after the other, with fresh gains."""
    schemes = []
    if situation.own_cap is None:
        wide = wide_cap(situation.largest, situation.cap)
        schemes += [Scheme(softcap=cap) for cap in dict.fromkeys((situation.cap, wide))]
    if not situation.normed:
        schemes += [SCHEMES["q_norm"], SCHEMES["qk_norm"]]
    trials = {}
    for scheme in schemes:
        with _patched(model, scheme):
            _, found = predictions(model, batches)
        if found is not None:
            trials[scheme] = found
    return trials


def try_knees(model: PreTrainedModel, batches: Batches, situation: Situation) -> KneeTrials | None:
    """Costs and bounds of knees on an unpatched model; None for one that takes no norms on queries and keys.

    Gains come from one half of the batches and are judged on the other; a single batch serves for both.
    """
    scheme = scheme_for_knees(situation)
    if family_of(model.config).refusal(model.config, scheme) is not None:
        return None
    cut = len(batches) // 2
    judged, fitted = batches[:cut] or batches, batches[cut:]
    with _patched(model, scheme):
        base, ones = predictions(model, judged)
        if base is None or ones is None:
            return None
        found = sweep(model, fitted, judged, partial(worst_bound, model))
    trials = (KneeTrial(knee, own.loss - base.loss, own.kl, bound) for knee, (own, bound) in found.items())
    return KneeTrials(scheme, ones.loss - base.loss, tolerance(base, ones), tuple(trials))


@contextmanager
def _patched(model: PreTrainedModel, scheme: Scheme) -> Iterator[None]:
    """The model has the scheme within, with the attention that forms no T×S mask."""
    patch_model(model, scheme, attn_implementation="hf_qknorm")
    try:
        yield
    finally:
        unpatch_model(model)
