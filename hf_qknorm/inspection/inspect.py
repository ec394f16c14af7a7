"""`inspect_model`: measure a model's attention, try schemes and knees on it, and advise a scheme."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from hf_qknorm.calibration.gains import ClosedFormGains
from hf_qknorm.calibration.knees import KNEES, LIMIT, SHARPNESS, cost
from hf_qknorm.checkpoint import load_causal, open_source
from hf_qknorm.families import family_of
from hf_qknorm.files.log import logger
from hf_qknorm.files.untrusted import check_positive, load_tokenizer
from hf_qknorm.inspection.advice import advise, knee_scheme, wide_cap
from hf_qknorm.measure import text
from hf_qknorm.measure.batches import Batches, check_batches, count_tokens, divided, longest_sequence
from hf_qknorm.measure.bounds import worst_bound
from hf_qknorm.measure.distributed import require_whole
from hf_qknorm.measure.logit_statistics import CAP
from hf_qknorm.measure.predictions import evaluate, predictions, require_causal
from hf_qknorm.model.attention import evaluating, patched_layers
from hf_qknorm.model.configs import QKNormConfig
from hf_qknorm.model.placement import placement
from hf_qknorm.model.rollback import undone_on_error
from hf_qknorm.patch import patch_model, unpatch_model
from hf_qknorm.reports.inspection import Inspection, scheme_name
from hf_qknorm.reports.records import Prediction
from hf_qknorm.scheme import SCHEMES, Scheme

SEQUENCES: Final = 8  # in a forward pass
SWEPT: Final = tuple(knee for knee in KNEES if knee >= 1)


def inspect_model(
    model: PreTrainedModel,
    data: Any,
    *,
    tokenizer: Any = None,
    max_tokens: int = 16_384,
    batch_size: int = SEQUENCES,
    length: int | None = None,
    cap: float | None = None,
) -> Inspection:
    """Measure the attention of a model, patched or not, on `data` (as for `calibrate`), and advise a scheme.

    The model is left as it was. Shares of large logits are relative to `cap`, by default the model's own cap, or 50. An
    unpatched model is also measured with the schemes that may suit it, and with the knees that `calibrate` tries, on an
    eighth of the sequences: in all this takes about three forward passes.

    Raises ValueError for a model that can't be patched, data with fewer than 16 tokens to predict, a cap that is not a
    finite number > 0, a length that is not possible, and logits that are not finite. Raises FileNotFoundError for a
    path that is not there.

    >>> found = qk.inspect_model(model, texts, max_tokens=1024)
    >>> found.base.kl, found.scheme is None, found.tokens <= 1024
    (0.0, True, True)
    """
    if cap is not None:
        check_positive(cap, "cap")
    require_whole(model)
    require_causal(model.config)
    batches = text.batches_for(model, data, tokenizer, batch=batch_size, length=length, max_tokens=max_tokens)
    check_batches(batches, model.config)
    names = model.name_or_path or type(model).__name__, model.config.model_type
    unpatched = not patched_layers(model)
    with _evaluating(model), undone_on_error(model):
        with _patched(model, SCHEMES["none"]) if unpatched else nullcontext():
            found = _measure(model, names, batches, cap, compared=not unpatched)
        if unpatched:
            found = _with_trials(model, batches, found)
    return replace(found, advice=advise(found))


def inspect_checkpoint(
    checkpoint: str,
    *,
    data: str | None = None,
    max_tokens: int = 16_384,
    length: int | None = None,
    cap: float | None = None,
) -> Inspection:
    """`inspect_model` for a checkpoint (a folder or a Hub name) and `data` (a source for `load_text`).

    If the checkpoint does not fit into memory, layers are read from the disk in each forward pass.

    Raises, before the weights are read, FileNotFoundError for a folder or a text that does not exist, OSError without a
    tokenizer, and ValueError for pickled or broken weights, a model that is not supported or no causal language model,
    an impossible cap or length, and too little text.
    """
    if cap is not None:
        check_positive(cap, "cap")
    text.check_text(data)
    source = open_source(checkpoint)
    if not isinstance(source.config, QKNormConfig):
        family_of(source.config)
    length = text.sequence_length(source.config, length)
    require_causal(source.config)
    tokenizer = load_tokenizer(source.folder)
    batches = text.as_batches(None, data, tokenizer, batch=SEQUENCES, length=length, max_tokens=max_tokens)
    check_batches(batches, source.config)
    with TemporaryDirectory(prefix="hf-qknorm-") as offload:
        model = load_causal(source, **placement(source.folder, None, Path(offload)))
        return inspect_model(model, batches, max_tokens=max_tokens, cap=cap)


def _measure(model: Any, names: tuple[str, str], batches: Batches, cap: float | None, *, compared: bool) -> Inspection:
    """The numbers of a patched model, and its predictions unpatched and patched, from one or two passes.

    `names` are the model's own and its type's. If not `compared`, the scheme changes nothing, and the model counts as
    unpatched.
    """
    first = next(iter(patched_layers(model).values()))
    cap = cap or first.softcap or CAP
    base, own, _, layers = evaluate(model, batches, cap, compared=compared)
    for name, layer in layers.items():
        if not all(map(math.isfinite, (*layer.max_logit, *layer.entropy))):
            raise ValueError(f"the attention logits of {name} are not finite in {model.dtype}: load it in float32")
    return Inspection(
        *names,
        tokens=count_tokens(*batches),
        length=longest_sequence(batches),
        context=text.context_length(model.config),
        cap=cap,
        layers=layers,
        scheme=first.scheme if compared else None,
        base=base if compared else own,
        patched=own if compared else None,
        normed=first.has_own_norms or None not in (first.scheme.q, first.scheme.k),
        latent=first.family.latent,
        own_cap=first.softcap,
    )


def _with_trials(model: PreTrainedModel, batches: Batches, found: Inspection) -> Inspection:
    """The inspection with what schemes that may suit an unpatched model, and knees, do on an eighth of the sequences.

    The losses of schemes are over all of the text: the unpatched model's, and the rise on the eighth. Knees are tried
    where queries and keys can be normed, up to the one that `calibrate` would set. Their gains follow from two numbers
    a layer, so the batches that judge set them too.
    """
    whole = found.base
    if whole is None:
        return found
    _, judged = divided(batches)
    kept: list[ModelOutput] = []  # of the unpatched model
    caps = (found.cap, wide_cap(found.largest, found.cap)) if found.own_cap is None else ()
    schemes = [Scheme(softcap=cap) for cap in dict.fromkeys(caps)]
    schemes += [SCHEMES["q_norm"], SCHEMES["qk_norm"]] if not found.normed else []
    trials: dict[str, Prediction] = {}
    for scheme in schemes:
        with _patched(model, scheme):
            trials[scheme_name(scheme)] = _trial(model, judged, kept, whole)
    found = replace(found, trials=trials)
    scheme = knee_scheme(found)
    if family_of(model.config).refusal(model.config, scheme) is not None:
        return found
    knees: dict[float, Prediction] = {}
    chosen = None
    with _patched(model, scheme):
        gains = ClosedFormGains(model, judged, [], SWEPT, SHARPNESS)  # one pass for all knees, as sharp as calibrate's
        for knee in SWEPT:
            gains.apply(knee)
            knees[knee] = _trial(model, judged, kept, whole)
            if chosen is not None:  # the next larger one, as a margin
                chosen = knee
                break
            chosen = knee if cost(whole, knees[knee]) <= LIMIT else None
    return replace(found, knees=knees, knee=chosen, knee_scheme=scheme)


def _trial(model: PreTrainedModel, judged: Batches, kept: list[ModelOutput], whole: Prediction) -> Prediction:
    """The model's prediction of the whole text: the loss of the unpatched model there, and the rise on `judged`."""
    base, own = predictions(model, judged, kept)
    assert base is not None
    assert own is not None
    return replace(own, loss=whole.loss + own.loss - base.loss, bound=worst_bound(model))


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Eval mode for the duration, without warnings: trials patch the model and undo it, so no one can act on them."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with evaluating(model):
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _patched(model: PreTrainedModel, scheme: Scheme) -> Iterator[None]:
    """Patch an unpatched model for the duration, with an attention function that forms no T×S mask."""
    configs = [(module, module.config) for module in model.modules() if "config" in vars(module)]
    patch_model(model, scheme, attn_implementation="hf_qknorm")
    try:
        yield
    finally:
        unpatch_model(model)
        for module, config in configs:  # which others may hold too
            module.config = config
