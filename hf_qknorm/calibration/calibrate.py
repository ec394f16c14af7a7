"""`calibrate`: a knee and gains that keep a trained model's predictions, computed from a text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from transformers.utils import ModelOutput

from hf_qknorm.calibration.gains import ClosedFormGains, named_norms, rescale_folded_weights
from hf_qknorm.calibration.knees import KNEES, Knee, resolve_knee, resolve_sharpness, search_knee, undone_calibration
from hf_qknorm.families.counterparts import counterpart
from hf_qknorm.files.log import logger
from hf_qknorm.files.paths import hub_name
from hf_qknorm.measure.batches import Batches, check_batches, count_tokens, divided, is_bidirectional, longest_sequence
from hf_qknorm.measure.distributed import require_whole
from hf_qknorm.measure.logit_statistics import CAP
from hf_qknorm.measure.predictions import evaluate, output_error, predictions, require_causal
from hf_qknorm.measure.text import INPUTS, batches_for, context_length
from hf_qknorm.model.adapters import check_held, is_adapter_layer, unwrap_peft
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.derived import QKNormModel
from hf_qknorm.model.fold import is_exact
from hf_qknorm.model.in_memory import mark_in_memory
from hf_qknorm.model.install import require_base
from hf_qknorm.model.knees import NO_NORM, knee_of, sharpness_of
from hf_qknorm.model.record import set_record
from hf_qknorm.reports.records import LayerReport, Prediction
from hf_qknorm.reports.report import Calibration
from hf_qknorm.scheme import Scheme

MAX_TOKENS = 262_144
FOLD_BATCHES = 16  # enough for the mean σ that folded projections are scaled to
LEAST_JUDGED = 2048  # tokens; with 512, knees were found that cost more than the limit on other text
FEW = (
    "the knee is chosen by its cost on %d tokens, which is uncertain on so few: give %d tokens of text or more, in "
    "sequences of at least %d, or a knee"
)
HELD_OUT = 4, 64, LEAST_JUDGED  # the fewest and most sequences, and fewest tokens, that judge gains and knee


def calibrate(
    model: nn.Module,
    data: Any,
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

    Gains are in closed form: per channel the least-squares fit of the model's own projection by its normalised self,
    x ≈ gain·norm(x) + bias, from one pass over the text.

    `knee` is a number, as an export needs (0 for plain norms), or "auto". The search finds the least of `KNEES` in
    `calibration.knees` that costs at most `max_loss_increase` nats per token (by default 0.005) on an eighth of the
    sequences, which the fit leaves out. It sets the next larger one, as a margin for text of other kinds. Of a short
    text up to half judges, for 2,048 tokens; a warning says if there are fewer. The cost is the rise in loss, or the KL
    from the unpatched model if that is larger. If no knee keeps the limit, because of a cap for example, a warning says
    so. A model that predicts no tokens is judged by the relative error of its last hidden states, of at most 0.05
    (`output_error` in the report). None means "auto" if the scheme has gains and keeps the norm in front of attention;
    otherwise 0. "auto" takes about two forward passes over a long text.

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
    that is not patched, or is wrapped or sharded for several processes, or trained by DeepSpeed; a knee that is
    not possible; a loss that rises by more than `max_loss_increase`; a limit on the loss without a language-
    modelling head; norms outside of the model's adapters; folded norms (`pre_norm=False`) that a checkpoint did not
    keep; offloaded gains; biases behind folded norms in projections under adapters; and with `exportable` a model that
    no native one equals. Raises FileNotFoundError for a path that is not there.

    >>> model = qk.patch_model(model, "qk_norm")
    >>> report = qk.calibrate(model, texts)
    >>> report.knee > 0
    True
    >>> report.loss - report.base.loss < 0.1  # nats
    True
    """
    require_whole(model)
    check_held(model)
    bare = unwrap_peft(model)
    knee = resolve_knee(_scheme_of(bare), knee, max_loss_increase, exportable)
    sharpness = resolve_sharpness(sharpness, knee, exportable)
    if exportable:
        counterpart(bare.config)  # raises without one
    _check_supported(bare, max_loss_increase)
    batches = batches_for(bare, data, tokenizer, batch=batch_size, length=length, max_tokens=max_tokens)
    check_inputs(bare, batches)
    check_batches(batches, bare.config)
    others, judged = divided(batches, *(HELD_OUT if "input_ids" in batches[0] else HELD_OUT[:2]))
    with undone_calibration(bare):
        _reset_norms(bare, batches, bare.config.rms_norm_eps if exportable else None)
        kept: list[ModelOutput] = []  # of the unpatched model
        base, fresh = predictions(bare, judged, kept)
        tried: dict[float, Prediction] = {}
        if isinstance(knee, str):
            if base is not None and (count := count_tokens(*judged)) < LEAST_JUDGED:
                logger.warning(FEW, count, 2 * LEAST_JUDGED, LEAST_JUDGED // HELD_OUT[1])
            gains = ClosedFormGains(bare, others or batches, judged[:1], KNEES, sharpness)
            tried = search_knee(gains, judged, base, max_loss_increase, kept)
        else:
            gains = ClosedFormGains(bare, batches, judged[:1], (knee,), sharpness, exportable)
            gains.apply(knee)
        final = float(knee) if exportable else min(knee_of(bare), NO_NORM)
        report = _report(bare, batches, judged, ones=fresh, knees=tried, knee=final)
        _check_rise(report.base, report.chosen, max_loss_increase)
        set_record(bare, report.to_dict())
        if bare.config.scheme.norms:
            mark_in_memory(bare)
    return report


def _scheme_of(model: Any) -> Scheme:
    """The scheme of a patched model. Raises ValueError for another model, and names a patched tower in it."""
    if not isinstance(model, QKNormModel):
        towers = [name for name, module in model.named_modules() if isinstance(module, QKNormModel)]
        if towers:
            raise ValueError(
                f"of {type(model).__name__} only a tower is patched, {towers[0]}: calibrate the tower, as "
                f"calibrate(model.{towers[0]}, data)"
            )
        raise ValueError(f"{type(model).__name__} is not patched with a scheme: call patch_model(model, scheme) first")
    return model.config.scheme


def check_inputs(model: Any, batches: Batches) -> None:
    """Raise ValueError for batches without the model's input, or without labels that a masked language model needs."""
    if missing := next((batch for batch in batches if model.main_input_name not in batch), None):
        raise ValueError(
            f'{type(model).__name__} takes "{model.main_input_name}", and a batch has {", ".join(missing)}: give '
            "mappings with it"
        )
    predicts_masked = is_bidirectional(model.config) and model.get_output_embeddings() is not None
    if predicts_masked and not all("labels" in batch for batch in batches):
        raise ValueError(
            f"{type(model).__name__} has bidirectional attention and predicts masked tokens: give batches with "
            '"input_ids", some of them masked, and "labels", as DataCollatorForLanguageModeling makes them'
        )


def _check_supported(model: Any, limit: float | None) -> None:
    """Raise ValueError for a model that can't be calibrated, or judged by this limit."""
    if model.main_input_name not in INPUTS or model.config.is_encoder_decoder:
        require_causal(model.config)
    require_base(model)
    for (layer, name), norm in named_norms(model).items():
        if any(p.is_meta for p in norm.parameters()):
            raise ValueError(
                f"the gains of {layer}.{name} are offloaded, where new values are lost: load the model into memory, or "
                "calibrate the original checkpoint while it is converted (convert_checkpoint with max_memory)"
            )
    layers = [] if model.config.scheme.pre_norm or is_exact(model) else patched_layers(model).values()
    if any(is_adapter_layer(layer.get_submodule(part)) for layer in layers for part in layer.family.style.weights):
        raise ValueError(
            "a scheme with pre_norm=False scales projections, and some are under adapters, which do not save them: "
            "calibrate before you add adapters"
        )
    if limit is not None and model.get_output_embeddings() is None:
        raise ValueError(
            f"{type(model).__name__} predicts no tokens, which max_loss_increase={limit:g} compares: leave it out, or "
            "calibrate the language model"
        )


def _report(model: Any, batches: Batches, judged: Batches, **numbers: Any) -> Calibration:
    """The report of a calibrated model, with the numbers that the calibration has."""
    cap = model.config.attn_logit_softcapping or CAP
    found = evaluate(model, judged, cap)
    from_hub = bool(getattr(model.config, "_commit_hash", None))  # a folder has none
    return Calibration(
        tokens=count_tokens(*batches),
        scheme=model.config.scheme,
        cap=cap,
        base=found.base,
        chosen=found.own,
        layers={name: LayerReport(found.before[name], after) for name, after in found.after.items()},
        judged=count_tokens(*judged),
        base_model=hub_name(str(model.name_or_path)) if from_hub else None,
        length=longest_sequence(batches) or None,
        context=context_length(model.config),
        output_error=output_error(model, judged) if found.base is None else None,
        sharpness=sharpness_of(model),
        **numbers,
    )


def _check_rise(before: Prediction | None, after: Prediction | None, limit: float | None) -> None:
    """Raise ValueError if the loss rises by more than the limit, or is NaN."""
    if limit is not None and before and after and not after.loss - before.loss <= limit:
        raise ValueError(
            f"the loss rises by {after.loss - before.loss:.4f} nats ({before.loss:.4f} to {after.loss:.4f}), more "
            f'than max_loss_increase={limit:g}. A larger knee, or knee="auto", keeps more'
        )


def _reset_norms(model: Any, batches: Batches, eps: float | None) -> None:
    """Reset the norms to plain ones with fresh gains, with this eps if any, and folded projections to the text's σ."""
    if eps is not None:
        for layer in patched_layers(model).values():
            layer.scheme = replace(layer.scheme, eps=eps)
            layer.config.set_scheme(layer.scheme)
    for norm in named_norms(model).values():
        norm.reset_parameters()
        norm.eps = norm.eps if eps is None else eps
    if not model.config.scheme.pre_norm and not is_exact(model):
        rescale_folded_weights(model, batches[:FOLD_BATCHES])
