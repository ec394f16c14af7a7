"""Remove the norms of queries and keys from a calibrated model.

A `KneeSchedule` with the target ∞ turns each norm into a constant factor while the model trains, and `remove_norms`
folds the factors into the projections. The result is a model that never had norms, which conversions to latent
attention need, such as MHA2MLA (arXiv 2502.14837): a norm behind a projection can't be absorbed.

Source: TaperNorm (Kanavalau et al. 2026, arXiv 2602.10408), which removes the norms between layers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hf_qknorm.calibration.knees import restored_attention
from hf_qknorm.files.log import logger
from hf_qknorm.measure.batches import Batches, check_batches, count_tokens
from hf_qknorm.measure.predictions import loss_of
from hf_qknorm.measure.text import batches_for
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.fsdp import fsdp_modules
from hf_qknorm.model.knees import set_knee
from hf_qknorm.model.rollback import undone_on_error
from hf_qknorm.patch import patch_model, unpatch_model
from hf_qknorm.training.constant_norms import check_norms, constant_norms, without_norms


def remove_norms(
    model: PreTrainedModel,
    data: Any = None,
    *,
    max_loss_increase: float | None = None,
    tokenizer: Any = None,
    max_tokens: int = 16_384,
    batch_size: int = 8,
    length: int | None = None,
) -> PreTrainedModel:
    """Fold norms that have become constant factors into the projections, in place; the model is then unpatched.

    Each norm's gain, over the constant that it divides by, scales the rows of W_q or W_k, before RoPE. This is exact up
    to rounding. A cap stays, with the model still patched, until `unpatch_model`. Make a new optimiser after it.

    Norms that still act (a knee below 2³⁰) are ended by `KneeSchedule(target=math.inf)` during training, by
    `set_knee(model, math.inf)`, or here if `data` is given, text or batches as for `calibrate`. The loss on it before
    and after is logged. It must not rise by more than `max_loss_increase` nats per token; None means no limit. Sharp
    norms that bound few vectors cost little: calibrated, and before any training, about what they cost when added.

    Raises TypeError for a wrapped model. Raises ValueError, before anything changes, for a model that is not patched,
    norms that still act without `data`, norms that hold no mean length, norms of values or of latent attention, a bias
    of a norm that no projection can take, shared weights, a clip in front of the norms, weights that are sharded or
    that DeepSpeed trains, a rise above the limit, and a limit without `data`. Raises FileNotFoundError for a path that
    is not there.

    >>> _ = qk.calibrate(qk.patch_model(model, qk.Scheme(q="rms", k="rms", softcap=50.0)), texts)
    >>> print(qk.remove_norms(model, texts).config.scheme)
    softcap=50.0
    """
    if data is None and max_loss_increase is not None:
        raise ValueError(f"max_loss_increase={max_loss_increase:g} needs data: give text to measure the loss on")
    _check_bare(model)
    check_norms(model)
    batches = None
    if data is not None:
        batches = batches_for(model, data, tokenizer, batch=batch_size, length=length, max_tokens=max_tokens)
        check_batches(batches, model.config)
    with restored_attention(model, only_on_error=True):
        if batches is not None:
            _end_norms(model, batches, max_loss_increase)
        return _fold_norms(model)


def _end_norms(model: Any, batches: Batches, limit: float | None) -> None:
    """Turn the norms into constant factors, and log the loss before and after. Raises ValueError above the limit."""
    before = loss_of(model, batches)
    set_knee(model, math.inf)
    after = loss_of(model, batches)
    change = f"from {before:.4f} to {after:.4f} ({after - before:+.4f} nats, {count_tokens(batches):,} tokens)"
    if limit is not None and not after - before <= limit:
        raise ValueError(
            f"without its norms the model's loss goes {change}, more than max_loss_increase={limit:g}. Train on with "
            "KneeSchedule(target=math.inf), or keep the norms"
        )
    logger.warning(f"norms removed: the loss goes {change}")


def _fold_norms(model: PreTrainedModel) -> PreTrainedModel:
    """Fold norms that are constant factors into the projections, and unpatch the model."""
    found = constant_norms(model)
    for constant in found:
        _check_whole(constant.projection)
    rest = without_norms(next(iter(patched_layers(model).values())).scheme)
    backend = model.config._attn_implementation
    with undone_on_error(model) as keep, torch.no_grad():
        for constant in found:
            for parameter in constant.projection.parameters(recurse=False):
                keep(parameter)
                parameter.copy_(constant.folded(parameter))
        unpatch_model(model)
        if not rest.changes_nothing:
            patch_model(model, rest, attn_implementation=backend)
    if not rest.changes_nothing:
        logger.warning(f"the cap of {rest.softcap:g} stays, with the model patched: unpatch_model(model) takes it off")
    return model


def _check_bare(model: Any) -> None:
    """Raise TypeError for a wrapper, which has no class to change back, and ValueError for a sharded model."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"got a {type(model).__name__}, expected a transformers PreTrainedModel: give the model inside the wrapper "
            "of DDP or torch.compile, and merge an adapter into it before"
        )
    if fsdp_modules(model):
        raise ValueError("the model is sharded by FSDP2: save it, and prepare and fold the whole model on one device")


def _check_whole(model: nn.Module) -> None:
    """Raise ValueError for weights that are not whole and in memory."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) or parameter.is_meta:
            raise ValueError(f"{name} is sharded or offloaded: prepare and fold the whole model on one device")
