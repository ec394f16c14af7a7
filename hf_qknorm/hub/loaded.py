"""Whether the weights that were loaded fit the scheme that a config tells of."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import load_state_dict

from hf_qknorm.attention import NORM_NAMES, head_norms, patched_layers
from hf_qknorm.settings import config_file

PARAMETERS: Final = ("weight", "bias", "blend", "eps")  # of a norm
DTYPES_OF_TORCH: Final = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
DTYPES: Final = frozenset(DTYPES_OF_TORCH.values())
_AFTERWARDS = ContextVar("the model that is being loaded is checked afterwards", default=False)
_ELSEWHERE = ContextVar("shapes are compared by the caller of the loading", default=False)


@contextmanager
def checked_afterwards() -> Iterator[None]:
    """Leave it to `check_loaded`, which can tell more of what is wrong."""
    token = _AFTERWARDS.set(True)
    try:
        yield
    finally:
        _AFTERWARDS.reset(token)


@contextmanager
def checked_elsewhere() -> Iterator[None]:
    """Leave missing tensors and shapes to the caller, who knows the files that they are in."""
    token = _ELSEWHERE.set(True)
    try:
        with checked_afterwards():
            yield
    finally:
        _ELSEWHERE.reset(token)


def check_dtypes(model: PreTrainedModel, state_dict: dict[str, Any] | None, files: list[str] | None) -> None:
    """Raise ValueError for gains, biases, blends and knees that are not of a floating-point dtype of 16 bits or more.

    It looks before the weights are loaded: the model casts them, and a rounded or cut gain changes what it computes.
    """
    norms = {name for layer in patched_layers(model).values() for name in head_norms(layer)}
    if not norms:
        return
    for where, name, dtype in _dtypes(state_dict, files or []):
        *_, norm, parameter = ["", *name.split(".")]
        if norm in norms and parameter in PARAMETERS and dtype not in DTYPES:
            raise ValueError(
                f"{where}: {name!r} has dtype {dtype}, expected one of {', '.join(sorted(DTYPES))}: gains are never "
                "quantised. Restore the weights"
            )


def _dtypes(state_dict: dict[str, Any] | None, files: list[str]) -> Iterator[tuple[str, str, str]]:
    """Where each tensor is, its name, and its dtype as safetensors calls it."""
    if state_dict is not None:
        yield from (("state_dict", name, _called(value)) for name, value in state_dict.items())
        return
    for file in filter(os.path.isfile, files):  # of others transformers says what is wrong
        if file.endswith(".safetensors"):
            with safe_open(file, "pt") as weights:
                names = weights.keys()
                yield from ((file, name, weights.get_slice(name).get_dtype()) for name in names)
        else:
            pickled = load_state_dict(file, map_location="meta")
            yield from ((file, name, _called(value)) for name, value in pickled.items())


def _called(tensor: Any) -> str:
    return DTYPES_OF_TORCH.get(tensor.dtype, str(tensor.dtype))


def check_shapes(model: PreTrainedModel, mismatched: Iterable[tuple[str, Any, Any]], *, others: bool = False) -> None:
    """Raise ValueError for norms of another shape in the weights, given as name, shape there, and shape in the model.

    Also with `ignore_mismatched_sizes=True`: a fresh gain in the place of a trained one is another model. `others`:
    raise RuntimeError, as transformers does, for other tensors.
    """
    if _ELSEWHERE.get():
        return
    own = _norm_parameters(model)
    mismatched = sorted((name, list(got), list(expected)) for name, got, expected in mismatched)
    wrong = [found for found in mismatched if found[0] in own]
    if wrong:
        name, got, expected = wrong[0]
        what = f"of another shape in the weights ({name!r} is {got}, expected {expected})"
        raise _disagreement(model, what, [name for name, _, _ in wrong])
    for name, got, expected in mismatched if others else ():
        raise RuntimeError(
            f"{config_file(model.config)} asks for {name} in shape {expected}, and the weights have it in {got} "
            f"({len(mismatched)} tensors in all). Restore the config.json or the weights that belong together"
        )


def check_loaded(model: PreTrainedModel, info: dict[str, Any]) -> None:
    """Raise ValueError for norms that `from_pretrained` found missing, or without a place in the scheme."""
    own = _norm_parameters(model)
    prefix = f"{model.base_model_prefix}."

    def ours(keys: Any) -> list[str]:
        return sorted(key for key in keys if key in own or f"{prefix}{key}" in own or key.removeprefix(prefix) in own)

    problems = {
        "missing from the weights": ours(info["missing_keys"]),
        "in the weights but not in the scheme": ours(info["unexpected_keys"]),
    }
    for what, keys in problems.items():
        if keys:
            raise _disagreement(model, what, keys)


def _norm_parameters(model: PreTrainedModel) -> set[str]:
    """What the norms' parameters may be called, those of any scheme."""
    return {
        f"{layer}.{norm}.{parameter}"
        for layer in patched_layers(model)
        for norm in NORM_NAMES.values()
        for parameter in PARAMETERS
    }


def check_none_missing(model: PreTrainedModel) -> None:
    """Raise ValueError if the layers' weights were loaded and a norm's were not.

    For towers of multimodal models, whose checkpoints transformers' own class loads: it would make up what is missing.
    """
    if _AFTERWARDS.get():
        return
    parameters = {
        f"{layer}.{name}": tensor
        for layer, module in patched_layers(model).items()
        for name, tensor in (*module.named_parameters(), *_knees(module))
    }
    loaded = {name for name, parameter in parameters.items() if getattr(parameter, "_is_hf_initialized", False)}
    missing = [name for name in parameters if name.split(".")[-2] in NORM_NAMES.values() and name not in loaded]
    if loaded and missing:
        raise _disagreement(model, "missing from the weights, or of another shape there", missing)


def check_knees(model: PreTrainedModel) -> None:
    """Raise ValueError for a knee's ε that is not finite and above 0: its norms would give NaN, or no bound."""
    for layer, module in patched_layers(model).items():
        for name, eps in _knees(module):
            if not eps.is_meta and not (bool(eps.isfinite()) and eps > 0):
                raise ValueError(
                    f"{model.config._name_or_path or 'the checkpoint'}: {layer}.{name} is {float(eps)}, expected a "
                    "finite number > 0. Restore the weights"
                )


def _knees(layer: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The ε of a layer's norms that have a knee, by name."""
    return [(name, eps) for name, eps in layer.named_buffers() if name.split(".")[-1] == "eps"]


def _disagreement(model: PreTrainedModel, what: str, keys: list[str]) -> ValueError:
    scheme = {str(layer.scheme): None for layer in patched_layers(model).values()}
    return ValueError(
        f"{model.config._name_or_path or 'the checkpoint'}: {len(keys)} norm parameters are {what}, first "
        f"{keys[0]!r}. config.json says qk_norm = {' and '.join(scheme)}; loading would silently change the "
        "model. Restore the matching config.json or weights"
    )
