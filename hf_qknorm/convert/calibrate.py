"""`calibrate`: a knee and gains that keep a trained model's predictions, from its queries, keys and values on text."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hf_qknorm.convert.fit import check_movable, fit_gains
from hf_qknorm.convert.knees import KNEES, restored, search
from hf_qknorm.convert.moments import fit_spread, moments, norm_sizes, norms_of
from hf_qknorm.convert.pretrained import load_tokenizer
from hf_qknorm.convert.text import as_batches, check_batches
from hf_qknorm.files.formatting import shorten
from hf_qknorm.files.hub_names import hub_name
from hf_qknorm.model.attention import patched_layers, require_base
from hf_qknorm.model.derived import QKNormModel
from hf_qknorm.model.fold import is_exact
from hf_qknorm.model.knees import put_knee
from hf_qknorm.scheme import Scheme
from hf_qknorm.stats.distributed import Ranks, broadcast_attention, gather_batches, ranks_of, reshard, unwrap
from hf_qknorm.stats.logit_statistics import CAP
from hf_qknorm.stats.measure import evaluate, layer_reports, predictions, require_causal
from hf_qknorm.stats.records import Prediction
from hf_qknorm.stats.report import Calibration

METHODS = ("ones", "moments", "fit", "fit_qk")
LENGTH, LEARNED = 256, 1024  # tokens in a sequence, and at most where positions are learned
MAX_TOKENS = 262_144
START_BATCHES = 16  # moments of these are a good enough start for a fit
LOSS_BATCHES = 8  # at most, and one in ten: they judge; gains and knee come from the others

Knee = float | Literal["auto"]


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
    steps: int = 120,
) -> Calibration:
    """Set the knee, gains and biases of a patched model from `data`, in place, and report the outcome.

    `data` is a list of strings, a `datasets.Dataset`, a file, a folder, the name of a Hub dataset, or an iterable of
    batches: tensors `[B, T]` or mappings with "input_ids" and perhaps "attention_mask" (padding is left out). Text is
    cut into batches `[batch_size, length]`, by default 256 long, or half of the positions where these are learned; at
    most `max_tokens` tokens are used. Text needs a tokenizer, by default the one of `model.name_or_path`.

    By default one pass through the unpatched model gives the gains for every knee, and the knee is the smallest of
    `convert.knees.KNEES` that costs no more than `max_loss_increase` nats a token (by default 1 % of what fresh gains
    cost, or 0.005 if that is more) on batches that the pass leaves out. The cost is the rise in loss, or the KL from
    the unpatched model where that is more. From ten batches on, the forward passes are at most twice those over the
    data.

    `method` names how gains are found. "moments", the default, is the closed form: per channel the least-squares fit of
    the model's own projection by its normalised self, x ≈ gain·norm(x) + bias. "fit" goes on from there and trains the
    gains alone, for at most `steps` steps, to predict as the unpatched model does. "fit_qk" also moves the weights that
    lead to queries and keys, for good: `unpatch_model` then no longer gives the model back. "ones" puts fresh gains
    back. `knee` is a number, which fixes it, or "auto", the search. None is "auto" where no method is named and the
    scheme has gains, a norm in front and no knee, and else the scheme's own. With `knee=0` the norms are plain, as
    export needs them.

    A PEFT model is calibrated with its adapters as they are: in the norms' trained copies, where it has them. With
    DistributedDataParallel, FSDP2 and tensor parallelism every rank makes the call, with its share of the batches or
    with the same data. Ranks that share a model divide the pass among them, and end with the same gains. A bare model
    is calibrated by the process that asks, with its own data. An exception leaves the norms as they were.

    Raises ValueError for data with hardly a token to predict, a model that is not patched or in a blend, an unknown
    method, a knee that the scheme can't have, a loss that rises by more than `max_loss_increase`, a search or a fit of
    a model without a language-modelling head, a fit of a sharded model, a model sharded by DeepSpeed, a model whose
    folded norms (`pre_norm=False`) a checkpoint did not keep, gains that are offloaded, and weights to be moved that
    are offloaded, quantised or under adapters.
    """
    wrapped, model = model, unwrap(model)
    ranks = ranks_of(wrapped)
    method, knee = settled(_scheme_of(model), method, knee, max_loss_increase)
    _require_calibratable(model, method, knee)
    length = length or length_for(model.config)
    load = partial(tokenizer_of, model) if tokenizer is None else lambda: tokenizer
    batches = list(as_batches(data, load, batch=batch_size, length=length, max_tokens=max_tokens))
    batches = gather_batches(batches, max_tokens, ranks)
    check_batches(batches, model.config)
    with restored(model, always=False):
        report = _calibrate(model, batches, method, knee, max_loss_increase, steps, ranks)
    broadcast_attention(wrapped, ranks)
    dataset = hub_name(data) if isinstance(data, str) else None
    return ranks.broadcast(replace(report, base_model=_base_name(model), dataset=dataset))


def settled(scheme: Scheme, method: str | None, knee: Knee | None, most: float | None) -> tuple[str, Knee]:
    """The method and knee of a calibration, where None stands for the default.

    Raises ValueError for a method that there is not, a knee that the scheme can't have, and a limit that is none.
    """
    if method not in (None, *METHODS):
        raise ValueError(f"unknown method {method!r}: expected one of {', '.join(METHODS)}")
    if most is not None and not math.isfinite(most):
        raise ValueError(f"max_loss_increase={most} is no limit: expected a finite number, or None")
    if isinstance(knee, str) and knee != "auto":
        raise ValueError(f'knee={shorten(knee)}: expected a number ≥ 0, "auto", or None')
    if method == "ones" and knee == "auto":
        raise ValueError('knee="auto" is found with gains by "moments": name another method than "ones", or a number')
    if knee is None:
        may = bool(scheme.norms) and scheme.pre_norm and scheme.gain != "none"
        knee = "auto" if may and method is None and not scheme.knee else scheme.knee
    else:
        replace(scheme, knee=1.0 if knee == "auto" else knee)  # raises for a scheme that can't have one
    return method or "moments", knee


def _calibrate(
    model: Any,
    batches: list[dict[str, Tensor]],
    method: str,
    knee: Knee,
    most: float | None,
    steps: int,
    ranks: Ranks,
) -> Calibration:
    """Calibrate a bare model by the batches."""
    cut, cap = min(LOSS_BATCHES, max(len(batches) // 10, 1)), model.config.attn_logit_softcapping or CAP
    watched, fitted = batches[:cut], batches[cut:] or batches
    training = model.training
    model.eval()
    try:
        _reset(model)
        if not model.config.scheme.pre_norm and not is_exact(model):
            fit_spread(model, batches[:START_BATCHES])
        base, ones = predictions(model, watched)  # None without a head, where nothing is searched
        tried: dict[float, Prediction] = {}
        if knee == "auto" and base is not None and ones is not None:
            found = moments(model, fitted, norm_sizes(model, watched[:1], ranks), KNEES, ranks)
            tried = search(found, watched, base, ones, most)
        elif method != "ones" or knee:
            text = batches if method == "moments" else fitted[:START_BATCHES]
            found = moments(model, text, norm_sizes(model, watched[:1], ranks), (float(knee),), ranks)
            found.put(float(knee), gains=method != "ones")
        if method.startswith("fit"):
            fit_gains(model, fitted, watched, steps=steps, projections=method == "fit_qk")
        judged = evaluate(model, watched, cap, ranks)
        _check_rise(judged, most)
        layers = layer_reports(model, judged.before, judged.after)
    except BaseException:
        for layer in patched_layers(model).values():
            for weight, before in getattr(layer, "base_weights", ()):
                weight.data.copy_(before)
        raise
    finally:
        model.train(training)
        for layer in patched_layers(model).values():
            vars(layer).pop("base_weights", None)
    tokens, tokens_judged = (sum(batch["input_ids"].numel() for batch in part) for part in (batches, watched))
    return Calibration(
        method=method,
        tokens=tokens,
        scheme=model.config.scheme,
        cap=cap,
        base=judged.base,
        ones=ones,
        chosen=judged.own,
        layers=layers,
        judged=tokens_judged,
        knees=tried,
    )


def _reset(model: Any) -> None:
    """Plain norms with fresh gains."""
    reshard(model)
    norms = norms_of(model)
    put_knee(model, 0.0, dict.fromkeys(norms, 1.0))
    for norm in norms.values():
        norm.reset_parameters()


def _check_rise(judged: Any, most: float | None) -> None:
    if most is None or judged.base is None:
        return
    rise = judged.own.loss - judged.base.loss
    if not rise <= most:
        raise ValueError(
            f"the loss rises by {rise:.4f} nats ({judged.base.loss:.4f} to {judged.own.loss:.4f}), more than "
            f'max_loss_increase={most:g}. A larger knee, or knee="auto", keeps more'
        )


def _base_name(model: PreTrainedModel) -> str | None:
    """The Hub name that a model was loaded by; a folder that is gone now has no commit."""
    return hub_name(model.name_or_path) if getattr(model.config, "_commit_hash", None) else None


def _scheme_of(model: Any) -> Scheme:
    """The scheme of a patched model. Raises ValueError for another, naming a patched tower in it."""
    if not isinstance(model, QKNormModel):
        towers = [name for name, module in model.named_modules() if isinstance(module, QKNormModel)]
        if towers:
            raise ValueError(
                f"of {type(model).__name__} a tower is patched, {towers[0]}: calibrate that by itself, as "
                f"calibrate(model.{towers[0]}, data, knee=4)"
            )
        raise ValueError(f"{type(model).__name__} is not patched: call patch_model(model, scheme) first")
    return model.config.scheme


def _require_calibratable(model: Any, method: str, knee: Knee) -> None:
    require_causal(model.config)
    if model.config.qk_norm_blend is not None:
        raise ValueError(
            "this model is in a blend: calibrate it before the blend is begun, or set_blend(model, 1) first"
        )
    require_base(model)
    for (layer, name), norm in norms_of(model).items():
        if any(p.is_meta for p in norm.parameters()):
            raise ValueError(
                f"the gains of {layer}.{name} are offloaded, where new values are lost: load the model into memory, or "
                "calibrate the original checkpoint while it is converted (convert_checkpoint with max_memory)"
            )
    moves = method == "fit_qk" or (not model.config.scheme.pre_norm and not is_exact(model))
    if (moves or method.startswith("fit")) and any(isinstance(p, DTensor) for p in model.parameters()):
        raise ValueError(
            f'this model is sharded over several devices, where a calibration trains nothing: use method="moments", or '
            f'calibrate it by "{method}" before it is sharded, and save it'
        )
    if method == "fit_qk":
        check_movable(model, 'method="fit_qk"')
    elif moves:
        check_movable(model, "a scheme with pre_norm=False")
    if (method.startswith("fit") or knee == "auto") and model.get_output_embeddings() is None:
        argument = 'knee="auto"' if knee == "auto" else f'method="{method}"'
        raise ValueError(
            f"{type(model).__name__} predicts no tokens, which {argument} compares: calibrate the causal language "
            "model, or use knee=4"
        )


def length_for(config: Any) -> int:
    """The default length of sequences: 256, or as far as the positions of a model of this config reach.

    Learned positions show in the lengths of queries and keys: of these, text has half, at most 1024.
    """
    positions = getattr(config, "max_position_embeddings", None) or LENGTH
    learned = getattr(config, "rope_parameters", None) is None
    return min(positions, max(LENGTH, min(positions // 2, LEARNED)) if learned else LENGTH)


def tokenizer_of(model: PreTrainedModel) -> Any:
    """The tokenizer of the checkpoint that the model came from. Raises ValueError for a model without a name."""
    if not model.name_or_path:
        raise ValueError("text needs a tokenizer, and this model has no name to load one by: pass tokenizer=")
    return load_tokenizer(model.name_or_path)
