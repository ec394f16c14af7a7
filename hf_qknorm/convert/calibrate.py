"""`calibrate`: gains that keep what a trained model knew, from what its queries, keys and values look like."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hf_qknorm.attention import as_unpatched, head_norms, patched_layers, require_base
from hf_qknorm.convert.fit import check_movable, fit_gains
from hf_qknorm.convert.measure import layer_reports, layer_statistics, predictions, require_causal
from hf_qknorm.convert.moments import fit_moments, fit_spread
from hf_qknorm.convert.ranks import from_first, gathered, group_of, unwrapped
from hf_qknorm.convert.report import Calibration
from hf_qknorm.convert.text import as_batches, check_batches
from hf_qknorm.convert.trained import load_tokenizer
from hf_qknorm.files import hub_name
from hf_qknorm.fold import is_exact
from hf_qknorm.hub.derived import QKNormModel
from hf_qknorm.training.monitor import CAP

METHODS = ("ones", "moments", "fit", "fit_qk")
LENGTH = 256
MAX_TOKENS = 262_144
START_BATCHES = 16  # moments of these are a good enough start for a fit
LOSS_BATCHES = 8  # enough to see a jump; the gains themselves come from all the data


def calibrate(
    model: nn.Module,
    data: Any,
    method: str = "fit",
    *,
    tokenizer: Any = None,
    max_tokens: int = MAX_TOKENS,
    batch_size: int = 8,
    length: int | None = None,
    steps: int = 120,
) -> Calibration:
    """Set the gains (and biases) of a patched model from `data`, in place, and say what it bought.

    `data` is a list of strings, a `datasets.Dataset`, a file, a folder, the name of a Hub dataset, or an iterable of
    batches: tensors `[B, T]` or mappings with "input_ids" and perhaps "attention_mask" (padding is left out). Text is
    cut into batches `[batch_size, length]`, by default 256 long or as far as the model's positions reach; at most
    `max_tokens` tokens are used. Text needs a tokenizer, by default the one of `model.name_or_path`.

    "fit" trains the gains alone, for at most `steps` steps, to predict what the unpatched model does, from "moments"
    on. "moments" is the closed form: per channel, the least-squares fit of the model's own projection by its normalised
    self, x ≈ gain·norm(x) + bias, in one pass through the unpatched model. "ones" puts the fresh gains back.
    "fit_qk" keeps the most: as "fit", with the weights that lead to queries and keys moving along, for good
    (`unpatch_model` then no longer gives the model that it was, and a blend has no exact start). What is reported is
    measured on batches that no step of a fit has seen, where there are at least two.

    A PEFT model is calibrated with its adapters as they are: in the norms' trained copies, where it has them. With
    DistributedDataParallel every rank makes the call, with its share of the batches or with the same data: all ranks
    compute with all batches, as one process would, and take the first rank's result. A bare model is calibrated by the
    process that asks, with its own data. Models that are sharded are calibrated before.

    Raises ValueError for data with hardly a token to predict, a model that is not patched, is sharded or in a blend, an
    unknown method, a fit of a model without a language-modelling head, a model whose folded norms (`pre_norm=False`) a
    checkpoint did not keep, and weights to be moved that are offloaded, quantised or under adapters.
    """
    group, model = group_of(model), unwrapped(model)
    _require_calibratable(model, method)
    length = length or length_for(model.config)
    load = partial(tokenizer_of, model) if tokenizer is None else lambda: tokenizer
    batches = list(as_batches(data, load, batch=batch_size, length=length, max_tokens=max_tokens))
    if group is not None:
        batches = gathered(batches, max_tokens, group)
    check_batches(batches, model.config)
    names = _base_name(model), hub_name(data) if isinstance(data, str) else None
    report = _calibrate(model, batches, method, steps, names)
    return report if group is None else from_first(model, report, group)


def _calibrate(
    model: Any, batches: list[dict[str, Tensor]], method: str, steps: int, names: tuple[str | None, str | None]
) -> Calibration:
    """Calibrate a bare model by the batches; `names` are those of the model and its data, for the report."""
    cut, cap = min(LOSS_BATCHES, len(batches) // 2), model.config.attn_logit_softcapping or CAP
    watched, fitted = batches[:cut] or batches, batches[cut:]
    training = model.training
    model.eval()
    try:
        with as_unpatched(model):
            before = layer_statistics(model, watched, cap)
        for layer in patched_layers(model).values():
            for norm in head_norms(layer).values():
                norm.reset_parameters()
        if not model.config.scheme.pre_norm and not is_exact(model):
            fit_spread(model, batches[:START_BATCHES])
        base, ones = predictions(model, watched)
        if method != "ones":
            fit_moments(model, batches if method == "moments" else batches[:START_BATCHES])
        if method.startswith("fit"):
            fit_gains(model, fitted, watched, steps=steps, projections=method == "fit_qk")
        chosen = ones if method == "ones" else predictions(model, watched)[1]
        layers = layer_reports(model, before, layer_statistics(model, watched, cap))
    finally:
        model.train(training)
        for layer in patched_layers(model).values():
            vars(layer).pop("base_weights", None)
    tokens, judged = (sum(batch["input_ids"].numel() for batch in part) for part in (batches, watched))
    return Calibration(method, tokens, model.config.scheme, cap, base, ones, chosen, layers, judged, *names)


def _base_name(model: PreTrainedModel) -> str | None:
    """The Hub name that a model was loaded by; a folder that is gone now has no commit."""
    return hub_name(model.name_or_path) if getattr(model.config, "_commit_hash", None) else None


def _require_calibratable(model: Any, method: str) -> None:
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}: expected one of {', '.join(METHODS)}")
    if not isinstance(model, QKNormModel):
        towers = [name for name, module in model.named_modules() if isinstance(module, QKNormModel)]
        if towers:
            raise ValueError(
                f"of {type(model).__name__} a tower is patched, {towers[0]}: calibrate that by itself, as "
                f'calibrate(model.{towers[0]}, data, "moments")'
            )
        raise ValueError(f"{type(model).__name__} is not patched: call patch_model(model, scheme) first")
    require_causal(model.config)
    if model.config.qk_norm_blend is not None:
        raise ValueError(
            "this model is in a blend: calibrate it before the blend is begun, or set_blend(model, 1) first"
        )
    if any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in model.parameters()):  # DeepSpeed's mark
        raise ValueError(
            "this model is sharded over several devices (FSDP, ZeRO-3 or tensor parallelism): calibrate it before, and "
            "save it"
        )
    require_base(model)
    if method == "fit_qk":
        check_movable(model, 'method="fit_qk"')
    elif not model.config.scheme.pre_norm and not is_exact(model):
        check_movable(model, "a scheme with pre_norm=False")
    if method.startswith("fit") and model.get_output_embeddings() is None:
        raise ValueError(
            f'{type(model).__name__} predicts no tokens, which method="{method}" compares: calibrate the causal '
            'language model, or use method="moments"'
        )


def length_for(config: Any) -> int:
    """How long sequences are by default: 256, or as far as the positions of a model of this config reach."""
    return min(LENGTH, getattr(config, "max_position_embeddings", LENGTH))


def tokenizer_of(model: PreTrainedModel) -> Any:
    """The tokenizer of the checkpoint that the model came from. Raises ValueError for a model without a name."""
    if not model.name_or_path:
        raise ValueError("text needs a tokenizer, and this model has no name to load one by: pass tokenizer=")
    return load_tokenizer(model.name_or_path)
