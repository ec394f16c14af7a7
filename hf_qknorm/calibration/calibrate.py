"""`calibrate`: a knee and gains that keep a trained model's predictions, computed from a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from transformers.utils import ModelOutput

from hf_qknorm.calibration.checks import check_inputs, check_supported, scheme_of
from hf_qknorm.calibration.gains import ClosedFormGains, expected_powers, named_norms, rescale_folded_weights
from hf_qknorm.calibration.knees import KNEES, restored_attention, search_knee, search_outputs
from hf_qknorm.calibration.options import Knee, exported_eps, resolve_method, resolve_sharpness
from hf_qknorm.files.hub_names import hub_name
from hf_qknorm.files.log import logger
from hf_qknorm.measure.batches import Batches, check_batches, count_tokens, divided, longest_sequence
from hf_qknorm.measure.distributed import require_whole
from hf_qknorm.measure.logit_statistics import CAP
from hf_qknorm.measure.predictions import evaluate, layer_reports, output_error, predictions
from hf_qknorm.measure.text import batches_for, context_length
from hf_qknorm.model.adapters import unwrap_peft
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.fold import is_exact
from hf_qknorm.model.in_memory import mark_in_memory
from hf_qknorm.model.knees import NO_NORM, knee_of, sharpness_of
from hf_qknorm.model.record import set_record
from hf_qknorm.reports.records import Prediction
from hf_qknorm.reports.report import Calibration

MAX_TOKENS = 262_144
FOLD_BATCHES = 16  # enough for the mean σ that folded projections are scaled to
LEAST_JUDGED = 2048  # tokens; with 512, knees were found that cost more than the limit on other text
HELD_OUT = 4, 64, LEAST_JUDGED  # the fewest and most sequences, and fewest tokens, that judge gains and knee


def calibrate(
    model: nn.Module,
    data: Any,
    method: str | None = None,
    *,
    knee: Knee | None = None,
    max_loss_increase: float | None = None,
    tokenizer: Any = None,
    max_tokens: int = MAX_TOKENS,
    batch_size: int = 8,
    length: int | None = None,
    exportable: bool = False,
    sharpness: float | None = None,
) -> Calibration:
    """Set the knee, gains and biases of a patched model from `data`, in place, and report the effect.

    `data` is one of:
    - texts, as a string or a list of strings, or a path to a file or a folder: cut into batches `[batch_size, length]`,
      by default 256 long, or half of the positions where these are learned. `tokenizer` is by default the one of
      `model.name_or_path`
    - batches, as your training has them: tensors `[B, T]`, or mappings that a list, a dataset or a DataLoader yields.
      All tensors that the model's forward takes are passed to it. Padding is left out, tokens with the label −100 are
      not predicted, and packed documents with "position_ids" are separate. An encoder of images takes "pixel_values"
      `[B, C, H, W]`, and `max_tokens` counts images. A model of masked tokens (BERT) needs "labels"

    At most about `max_tokens` tokens are used.

    `method` selects how gains are computed. "moments", the default, is the closed form: per channel the least-squares
    fit of the model's own projection by its normalised self, x ≈ gain·norm(x) + bias, from one pass over the text.
    "ones" resets the gains.

    `knee` is a number, as an export needs (0 for plain norms), or "auto". The search finds the least of `KNEES` in
    `calibration.knees` that costs at most `max_loss_increase` nats per token (by default 0.005) on an eighth of the
    sequences, which the fit leaves out. It sets the next larger one, as a margin for text of other kinds. Of a short
    text up to half judges, for 2,048 tokens; a warning says if there are fewer. The cost is the rise in loss, or the KL
    from the unpatched model if that is larger; a warning names a cap that costs too much, and one that costs less. A
    model that predicts no tokens is judged by the relative error of its last hidden states, of at most 0.05
    (`output_error` in the report). None means "auto" if no method is given and the scheme has gains and keeps the norm
    in front of attention; otherwise 0. "auto" takes about two forward passes over a long text.

    `sharpness`, a number ≥ 1, is how exactly vectors below the knee keep their length. None means 8 in a search, and 1,
    RMSNorm's form, for a fixed knee: it can be exported, and costs more at any bound.

    With `exportable` the knee is fixed, by default at 16, and each ε is the nearest one that is the model's own eps
    times a power of 4: `export_native` then only changes exponents, and a Qwen3 computes the same bits in float32. The
    model's own eps becomes the scheme's, and the gains carry the length, so that the knee can't move afterwards.

    A PEFT model is calibrated with its adapters in place, and the copies of the norms that the active one trains are
    set. Calibrate before DDP, FSDP or accelerate wraps the model: each process does it by itself, and the same data
    gives the same knees and gains. After an exception the model is as before. `save_pretrained` writes the report
    beside the weights, from then on.

    Raises ValueError for data with fewer than 16 tokens to predict, or without the labels of masked tokens; a model
    that is not patched, or is wrapped or sharded for several processes, or trained by DeepSpeed; a method or knee that
    is not possible; a loss that rises by more than `max_loss_increase`; a limit on the loss without a language-
    modelling head; folded norms (`pre_norm=False`) that a checkpoint did not keep; offloaded gains; biases behind
    folded norms in projections under adapters; and with `exportable` a model that no native one equals. Raises
    FileNotFoundError for a path that is not there.

    >>> model = qk.patch_model(model, "qk_norm")
    >>> report = qk.calibrate(model, texts)
    >>> report.method, report.knee > 0
    ('moments', True)
    >>> report.loss - report.base_loss < 0.1  # nats
    True
    """
    require_whole(model)
    bare = unwrap_peft(model)
    method, knee = resolve_method(scheme_of(bare), method, knee, max_loss_increase, exportable)
    sharpness = resolve_sharpness(sharpness, knee, exportable)
    own = exported_eps(bare.config) if exportable else None
    check_supported(bare, max_loss_increase)
    batches = batches_for(bare, data, tokenizer, batch=batch_size, length=length, max_tokens=max_tokens)
    check_inputs(bare, batches)
    check_batches(batches, bare.config)
    others, judged = divided(batches, *(HELD_OUT if "input_ids" in batches[0] else HELD_OUT[:2]))
    cap = bare.config.attn_logit_softcapping or CAP
    with restored_attention(bare, only_on_error=True):
        if own is not None:
            _set_eps(bare, own)
        _reset_norms(bare, batches)
        kept: list[ModelOutput] = []  # of the unpatched model
        base, fresh = predictions(bare, judged, kept)
        tried: dict[float, Prediction] = {}
        if isinstance(knee, str):
            gains = _closed_form(bare, others or batches, judged, KNEES, sharpness=sharpness)
            if base is None:
                search_outputs(gains, judged)
            else:
                _warn_of_few(count_tokens(judged))
                tried = search_knee(gains, judged, base, max_loss_increase, kept)
        elif method != "ones" or knee:
            gains = _closed_form(bare, batches, judged, (knee,), exportable=exportable, sharpness=sharpness)
            gains.apply(knee, gains=method != "ones")
        found = evaluate(bare, judged, cap)
        _check_rise(found.base, found.own, max_loss_increase)
        from_hub = bool(getattr(bare.config, "_commit_hash", None))  # a folder has none
        report = Calibration(
            method=method,
            tokens=count_tokens(batches),
            scheme=bare.config.scheme,
            cap=cap,
            base=found.base,
            ones=fresh,
            chosen=found.own,
            layers=layer_reports(bare, found.before, found.after),
            judged=count_tokens(judged),
            base_model=hub_name(str(bare.name_or_path)) if from_hub else None,
            knees=tried,
            length=longest_sequence(batches) or None,
            context=context_length(bare.config),
            output_error=output_error(bare, judged) if base is None else None,
            knee=float(knee) if exportable else min(knee_of(bare), NO_NORM),
            sharpness=sharpness_of(bare),
        )
        set_record(bare, report.to_dict())
    if bare.config.scheme.norms:
        mark_in_memory(bare)
    return report


def _closed_form(
    model: Any, text: Batches, sample: Batches, knees: Sequence[float], *, sharpness: float, exportable: bool = False
) -> ClosedFormGains:
    """The closed form over a text, for these knees."""
    expected = {} if sharpness > 1 else expected_powers(model, sample[:1])
    return ClosedFormGains(model, text, expected, knees, exportable, sharpness)


def _warn_of_few(judged: int) -> None:
    """Log a warning if a knee is judged on so few tokens that its cost is uncertain."""
    if judged < LEAST_JUDGED:
        logger.warning(
            "the knee is chosen by its cost on %d tokens, which is uncertain on so few: give %d tokens of text or "
            "more, in sequences of at least %d, or a knee",
            judged, 2 * LEAST_JUDGED, LEAST_JUDGED // HELD_OUT[1],
        )  # fmt: skip


def _check_rise(before: Prediction | None, after: Prediction | None, limit: float | None) -> None:
    """Raise ValueError if the loss rises by more than the limit, or is NaN."""
    if limit is not None and before and after and not after.loss - before.loss <= limit:
        raise ValueError(
            f"the loss rises by {after.loss - before.loss:.4f} nats ({before.loss:.4f} to {after.loss:.4f}), more "
            f'than max_loss_increase={limit:g}. A larger knee, or knee="auto", keeps more'
        )


def _set_eps(model: Any, eps: float) -> None:
    """Set the scheme's eps in a patched model."""
    for layer in patched_layers(model).values():
        layer.scheme = replace(layer.scheme, eps=eps)
        layer.config.set_scheme(layer.scheme)
    for norm in named_norms(model).values():
        norm.eps = eps


def _reset_norms(model: Any, batches: Batches) -> None:
    """Reset the norms to plain ones with fresh gains, and folded projections to the σ of the text."""
    for norm in named_norms(model).values():
        norm.reset_parameters()
    if not model.config.scheme.pre_norm and not is_exact(model):
        rescale_folded_weights(model, batches[:FOLD_BATCHES])
