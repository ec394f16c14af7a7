"""Remove the norms of queries and keys from a model that was trained with them.

`start_removal` prepares the norms, a `KneeSchedule` with the target ∞ turns each into a constant factor while the model
trains, and `remove_norms` folds the factors into the projections. The result is a model that never had norms, which
conversions to latent attention need, such as MHA2MLA (arXiv 2502.14837): a norm behind a projection can't be absorbed.

Source: TaperNorm (Kanavalau et al. 2026, arXiv 2602.10408), which removes the norms between layers.
"""

from __future__ import annotations

import json
import logging
import math
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3ForCausalLM

from hf_qknorm.calibration.gains import named_norms, observed_inputs
from hf_qknorm.calibration.knees import restored_attention
from hf_qknorm.export.constant_norms import SIDES, check_norms, constant_norms, sides, without_norms
from hf_qknorm.measure.distributed import Batches
from hf_qknorm.measure.head_weights import attention_head_weights, parameter_factors
from hf_qknorm.measure.predictions import loss_of
from hf_qknorm.measure.text import batches_for, check_batches
from hf_qknorm.model.attention import evaluating, head_norms, patched_layers
from hf_qknorm.model.fsdp import fsdp_modules
from hf_qknorm.model.in_memory import mark_in_memory
from hf_qknorm.model.knees import apply_knee, centred_and_size, set_knee
from hf_qknorm.model.norms import HeadNorm
from hf_qknorm.patch import patch_model, unpatch_model
from hf_qknorm.scheme import Scheme

logger = logging.getLogger(__name__)

START: Final = 2.0**-16  # the knee that a removal starts from: too small to change what a norm computes
CHECKPOINTING: Final = ("gradient_checkpointing", "_gradient_checkpointing_func")  # what transformers sets on modules


def start_removal(
    model: PreTrainedModel,
    data: Any,
    *,
    tokenizer: Any = None,
    max_tokens: int = 65_536,
    batch_size: int = 8,
    length: int | None = None,
) -> PreTrainedModel:
    """Prepare the norms of queries and keys for their removal in training, and return the model.

    A Qwen 3, whose norms are its own, is returned as a new model: a Llama with these norms as its scheme, which
    computes the same. A patched model without a knee is changed in place. Other models are refused.

    `data` is text or batches, as for `calibrate`. One pass of the model over it measures the mean square of each head's
    queries and keys. Their weights are scaled so that all heads of a layer have the same one, and the norms, which undo
    that, get a tiny knee that records it. Predictions stay the same, up to rounding and ε.

    Then train with `KneeSchedule(target=math.inf)`, and call `remove_norms`.

    Raises TypeError for a wrapped model. Raises ValueError, before anything changes, for a model without norms on
    queries or keys, with a knee or in a blend; a scheme that norms values or has no gains; latent attention and
    encoder-decoders; layers that share projections; a model that clips queries and keys in front of the norms; a Qwen 3
    with sliding windows; sharded weights; and data without text. Raises FileNotFoundError for a path that is not there.

    >>> model = qk.start_removal(qk.patch_model(model, "qk_norm"), texts)
    >>> qk.set_knee(model, float("inf"))  # at once; in training: KneeSchedule(target=math.inf)
    >>> type(qk.remove_norms(model)).__name__
    'LlamaForCausalLM'
    """
    _check_bare(model)
    own = isinstance(model, Qwen3ForCausalLM)
    if own:
        _check_qwen3(model)
    else:
        _check_patched(model)
    batches = batches_for(model, data, tokenizer, batch=batch_size, length=length, max_tokens=max_tokens)
    check_batches(batches, model.config)
    model = _as_llama(model) if own else model
    squares = _mean_powers(model, batches)
    parts = attention_head_weights(model)
    means = {}
    for name, layer in patched_layers(model).items():
        factors = {}
        for side, norm in sides(layer).items():
            found = squares[name, SIDES[side]]
            means[name, SIDES[side]] = float(found.mean())
            ratio = (found.mean() / found).pow(1 / norm.order)
            factors[side] = torch.where(found > 0, ratio, 1.0).float()
        with torch.no_grad():
            for parameter, factor in parameter_factors(parts[name], factors):
                parameter.mul_(factor)
    apply_knee(model, START, means)
    return model


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
    to rounding. A cap stays, with the model still patched. Make a new optimiser after it.

    Norms that still act (a knee below 2³⁰) are ended by `KneeSchedule(target=math.inf)` during training, by
    `set_knee(model, math.inf)`, or here if `data` is given, text or batches as for `calibrate`. The loss on it before
    and after is logged. It must not rise by more than `max_loss_increase` nats per token; None means no limit. Sharp
    norms that bound few vectors cost little: calibrated, and before any training, about what they cost when added.

    Raises TypeError for a wrapped model. Raises ValueError, before anything changes, for a model that is not patched or
    is in a blend, norms that still act without `data`, norms of values or of latent attention, a bias of a norm that no
    projection can take, layers that share projections, a clip in front of the norms, sharded weights, a rise above the
    limit, and a limit without `data`. Raises FileNotFoundError for a path that is not there.

    >>> model = qk.start_removal(qk.patch_model(model, qk.Scheme(q="rms", k="rms", softcap=50.0)), texts)
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
    tokens = sum(batch["input_ids"].numel() for batch in batches)
    change = f"from {before:.4f} to {after:.4f} ({after - before:+.4f} nats, {tokens:,} tokens)"
    if limit is not None and not after - before <= limit:
        raise ValueError(
            f"without its norms the model's loss goes {change}, more than max_loss_increase={limit:g}. Train on with "
            "KneeSchedule(target=math.inf), or keep the norms"
        )
    logger.warning("norms removed: the loss goes %s", change)


def _fold_norms(model: PreTrainedModel) -> PreTrainedModel:
    """Fold norms that are constant factors into the projections, and unpatch the model."""
    found = constant_norms(model)
    for constant in found:
        _check_whole(constant.projection)
    rest = without_norms(next(iter(patched_layers(model).values())).scheme)
    with torch.no_grad():
        for constant in found:
            for parameter in constant.projection.parameters(recurse=False):
                parameter.copy_(constant.folded(parameter))
    unpatch_model(model)
    if not rest.changes_nothing:
        patch_model(model, rest)
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


def _check_qwen3(model: Any) -> None:
    """Raise ValueError for a Qwen 3 that is no Llama but for its norms."""
    if type(model) is not Qwen3ForCausalLM:
        raise ValueError(f"{type(model).__name__} is changed already: call unpatch_model first")
    if windows := {*model.config.layer_types} - {"full_attention"}:
        raise ValueError(f"layers with {', '.join(windows)} would be lost: a Llama attends to all tokens")
    _check_whole(model)


def _check_patched(model: Any) -> None:
    """Raise ValueError for a model whose norms can't be removed by a knee."""
    if not patched_layers(model):
        raise ValueError(
            f"{type(model).__name__} is neither patched nor a Qwen 3: norms are removed from a patched model, or from "
            "a Qwen 3, which becomes a Llama"
        )
    check_norms(model)
    scheme = model.config.scheme
    if scheme.gain == "none":
        raise ValueError(f"got the scheme {scheme}: expected norms with gains, which follow the knee")
    if model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} is an encoder-decoder, whose norms can not be removed here")
    if scheme.knee:
        raise ValueError(f"the model has a knee, {scheme.knee:g}: end it by set_knee(model, 0)")
    _check_whole(model)


def _check_whole(model: nn.Module) -> None:
    """Raise ValueError for weights that are not whole and in memory."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) or parameter.is_meta or hasattr(parameter, "ds_id"):
            raise ValueError(f"{name} is sharded or offloaded: prepare and fold the whole model on one device")


def _as_llama(model: Any) -> PreTrainedModel:
    """A Qwen 3 as a patched Llama with the norms as its scheme; both share no weights."""
    settings, known = json.loads(model.config.to_json_string(use_diff=False)), LlamaConfig().to_dict()
    left = ("model_type", "architectures", "transformers_version", "_name_or_path")
    config = LlamaConfig(**{key: settings[key] for key in known if key in settings and key not in left})
    norms = tuple(f"{name}.weight" for name in SIDES.values())
    weights = {name: x.clone() for name, x in model.state_dict().items() if not name.endswith(norms)}
    llama: Any = LlamaForCausalLM.from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=model.dtype,
        attn_implementation=model.config._attn_implementation,
    )
    llama.config._name_or_path = llama.name_or_path = ""  # a name would log that the gains are fresh
    patch_model(llama.to(model.device), Scheme(q="rms", k="rms", eps=model.config.rms_norm_eps))
    for name, layer in patched_layers(llama).items():
        for norm_name, norm in head_norms(layer).items():
            assert norm.weight is not None
            norm.weight.data.copy_(model.get_submodule(f"{name}.{norm_name}").weight)
    for name, parameter in llama.named_parameters():
        parameter.requires_grad_(model.get_parameter(name).requires_grad)
    for name, module in llama.named_modules():
        if hasattr(module, "gradient_checkpointing"):
            own = vars(model.get_submodule(name))
            vars(module).update((key, own[key]) for key in CHECKPOINTING if key in own)
    llama.generation_config = model.generation_config
    llama.config._name_or_path = llama.name_or_path = model.name_or_path
    mark_in_memory(llama)
    return llama.train(model.training)


@torch.no_grad()
def _mean_powers(model: Any, batches: list[dict[str, Tensor]]) -> dict[tuple[str, str], Tensor]:
    """The mean |x|ᵖ of each norm's inputs by head, `[H]`, in the model as it computes."""
    norms = named_norms(model)
    found: dict[HeadNorm, list[Tensor]] = {norm: [] for norm in norms.values()}

    def observe(norm: HeadNorm, x: Tensor) -> None:
        _, sizes = centred_and_size(norm, x)
        found[norm].append(torch.stack([sizes.sum(0), torch.ones_like(sizes).sum(0)]).cpu().double())

    observers: dict[nn.Module, Any] = {norm: partial(observe, norm) for norm in found}
    with evaluating(model), observed_inputs(model, observers, unpatched=False) as run:
        for batch in batches:
            run(batch, True)
    # A norm without inputs, as in the cross-attention of a decoder alone, has a mean of 0.
    sums = {key: sum(found[norm], torch.zeros(2, 1, dtype=torch.float64)) for key, norm in norms.items()}
    return {key: total / count.clamp_min(1) for key, (total, count) in sums.items()}
