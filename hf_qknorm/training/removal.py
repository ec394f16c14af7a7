"""Remove the norms of queries and keys from a calibrated model.

A `KneeSchedule` with the target ∞ turns each norm into a constant factor while the model trains, and `remove_norms`
folds the factors into the projections. The result is a model that never had norms, which conversions to latent
attention need, such as MHA2MLA (arXiv 2502.14837): a norm behind a projection can't be absorbed.

Source: TaperNorm (Kanavalau et al. 2026, arXiv 2602.10408), which removes the norms between layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_qknorm.files.log import logger
from hf_qknorm.measure.batches import Batches, check_batches, count_tokens
from hf_qknorm.measure.distributed import require_whole
from hf_qknorm.measure.head_weights import HeadWeights, attention_head_weights, changeable_head_weights
from hf_qknorm.measure.predictions import loss_of
from hf_qknorm.measure.text import batches_for
from hf_qknorm.model.attention import evaluating, every_norm, head_norms, patched_layers, require_patched
from hf_qknorm.model.knees import knee_of, set_knee
from hf_qknorm.model.norms import HeadNorm
from hf_qknorm.model.rollback import undone_on_error
from hf_qknorm.model.towers import towers_of
from hf_qknorm.norms import NORMS
from hf_qknorm.patch import patch_model, unpatch_model
from hf_qknorm.scheme import Scheme


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
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"got a {type(model).__name__}, expected a transformers PreTrainedModel: give the model inside the wrapper "
            "of DDP or torch.compile, and merge an adapter into it before"
        )
    check_norms(model)
    require_whole(model)
    batches = None
    if data is not None:
        batches = batches_for(model, data, tokenizer, batch=batch_size, length=length, max_tokens=max_tokens)
        check_batches(batches, model.config)
    with evaluating(model), undone_on_error(model) as keep:
        if batches is not None:
            for norm in every_norm(model):
                keep(norm.knee)
            _end_norms(model, batches, max_loss_increase)
        return _fold_norms(model, keep)


def _end_norms(model: Any, batches: Batches, limit: float | None) -> None:
    """Turn the norms into constant factors, and log the loss before and after. Raises ValueError above the limit."""
    before = loss_of(model, batches)
    set_knee(model, math.inf)
    after = loss_of(model, batches)
    change = f"from {before:.4f} to {after:.4f} ({after - before:+.4f} nats, {count_tokens(*batches):,} tokens)"
    if limit is not None and not after - before <= limit:
        raise ValueError(
            f"without its norms the model's loss goes {change}, more than max_loss_increase={limit:g}. Train on with "
            "KneeSchedule(target=math.inf), or keep the norms"
        )
    logger.warning(f"norms removed: the loss goes {change}")


@torch.inference_mode()  # a model may have been made in it
def _fold_norms(model: PreTrainedModel, keep: Callable[[Tensor], None]) -> PreTrainedModel:
    """Fold norms that are constant factors into the projections, and unpatch the model."""
    kept = []  # of the model, or of each patched tower in it
    for path in [path for path in towers_of(model) if patched_layers(model.get_submodule(path))] or [""]:
        tower: Any = model.get_submodule(path)
        softcap = next(iter(patched_layers(tower).values())).scheme.softcap
        kept.append((path or None, softcap, tower.config._attn_implementation))
    for norm, part, scale in _constant_norms(model):
        for parameter in part.projection.parameters(recurse=False):
            keep(parameter)
            parameter.copy_(_folded(parameter, norm, part, scale))
    unpatch_model(model)
    for name, softcap, backend in kept:
        if softcap is not None:
            patch_model(model, Scheme(softcap=softcap), attn_implementation=backend, tower=name)
            logger.warning(f"the cap of {softcap:g} stays, with the model patched: unpatch_model(model) takes it off")
    return model


def _constant_norms(model: PreTrainedModel) -> list[tuple[HeadNorm, HeadWeights, float]]:
    """The norms, the outputs of the projections in front of them, and their further factors.

    That is the scheme's scale of the logits over the model's own for one norm of each layer, and 1 for others. Raises
    ValueError for norms that still act, projections that are offloaded, and a bias whose projection has none.
    """
    found, parts = [], attention_head_weights(model)
    for name, layer in patched_layers(model).items():
        scale = layer.logit_scale / layer.own_scale
        for name_of_norm, norm in head_norms(layer).items():
            part = parts[name][name_of_norm[0]]
            if norm.ratio < math.inf:
                raise ValueError(
                    f"the norms still act (knee {knee_of(layer):.3g}): train with KneeSchedule(target=math.inf) "
                    "after a calibration, or give remove_norms text, which ends them and measures the cost"
                )
            if part.weight.is_meta:
                raise ValueError(f"the projections of {name} are offloaded: fold the whole model on one device")
            if norm.bias is not None and bool(norm.bias.any()) and part.projection.bias is None:
                raise ValueError(
                    f"{name}.{name_of_norm} has a bias, and its projection has none to fold it into: train with a "
                    "scheme of bias=False"
                )
            found.append((norm, part, scale))
            scale = 1.0
    return found


def _folded(x: Tensor, norm: HeadNorm, part: HeadWeights, scale: float) -> Tensor:
    """Return the weight or bias x of the part's projection with a constant norm folded in, in fp64."""
    transposed = x.dim() == 2 and isinstance(part.projection, Conv1D)
    x = x.double().t().clone() if transposed else x.to(torch.float64, copy=True)
    rows = part.outputs(x.device)
    constant = norm.epsilon**-0.5 * norm.length() * scale
    gain = x.new_full(rows.shape, constant) * (1.0 if norm.weight is None else norm.weight.double().to(x.device))
    y = x[rows]  # [H, D], with the inputs behind
    y = y - y.mean(1, keepdim=True) if NORMS[norm.norm].centred else y
    y = y * gain.view(*gain.shape, *[1] * (y.dim() - 2))
    if y.dim() == 2 and norm.bias is not None:
        y = y + scale * norm.bias.double().to(x.device)
    x[rows] = y
    return x.t() if transposed else x


def check_norms(model: nn.Module) -> None:
    """Raise ValueError unless a patched model norms queries or keys alone, in full, each behind its own projection."""
    first = next(iter(require_patched(model).values()))
    if first.scheme.v is not None or not first.scheme.norms:
        raise ValueError(f"got the scheme {first.scheme}: expected norms of queries and keys alone")
    if first.family.latent:
        raise ValueError(
            "a norm of latent attention has no projection of its own to be folded into: keep the norms of this model"
        )
    if bound := getattr(first, "clip_qkv", None) or getattr(first.config, "clip_qkv", None):
        raise ValueError(
            f"the model clips its queries and keys to ±{bound:g} in front of the norms, which can't be folded past "
            "that: train it without the clip (clip_qkv=None) first"
        )
    changeable_head_weights(model, "folding the norms into the projections")
