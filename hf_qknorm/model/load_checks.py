"""Checks that loaded weights fit the scheme in the config."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from itertools import product
from typing import Any, Final

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.modeling_utils import load_state_dict

from hf_qknorm.files.formatting import shorten
from hf_qknorm.model.attention import head_norms, patched_layers
from hf_qknorm.model.config_checks import config_file
from hf_qknorm.model.knee_state_dict import switched_on
from hf_qknorm.model.norms import NORM_FIELDS, HeadNorm, eps_problem

PARAMETERS: Final = ("weight", "bias", "blend", "eps")  # of a norm
DTYPES_OF_TORCH: Final = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
DTYPES: Final = frozenset(DTYPES_OF_TORCH.values())
_SKIPPED = ContextVar("the caller of from_pretrained compares the tensors", default=False)


class UnpatchedClassError(ValueError):
    """Raised when a class of transformers gets a patched checkpoint or its config."""


def skip_load_checks() -> AbstractContextManager[None]:
    """Skip the checks of missing tensors and shapes: the caller makes them, and can name the file of a tensor."""
    return switched_on(_SKIPPED)


def check_stored(model: PreTrainedModel, state_dict: dict[str, Any] | None, files: list[str] | None) -> bool:
    """Whether the weights hold the ε of norms.

    Raises ValueError for norm parameters that are not floating point of 16 bits or more, and for an ε that is not
    finite or below the scheme's. The check comes before loading, which casts the weights: rounded gains would change
    the result.
    """
    layers = patched_layers(model).values()
    norms = {name: norm.scheme_eps for layer in layers for name, norm in head_norms(layer).items()}
    has_eps = False
    for where, name, tensor in _tensors(state_dict, files or []) if norms else ():
        *_, norm, parameter = ["", *name.split(".")]
        if norm not in norms or parameter not in PARAMETERS:
            continue
        sliced = hasattr(tensor, "get_dtype")
        dtype = tensor.get_dtype() if sliced else DTYPES_OF_TORCH.get(tensor.dtype, str(tensor.dtype))
        if dtype not in DTYPES:
            raise ValueError(
                f"{where}: {shorten(name)} has dtype {dtype}, expected one of {', '.join(sorted(DTYPES))}: norms are "
                "never quantised. Restore the weights"
            )
        has_eps |= parameter == "eps"
        shape = tensor.get_shape() if sliced else list(tensor.shape)
        if parameter == "eps" and not shape and (problem := eps_problem(tensor[...], norms[norm])):
            raise ValueError(f"{where}: {shorten(name)} {problem}")
    return has_eps


def _tensors(state_dict: dict[str, Any] | None, files: list[str]) -> Iterator[tuple[str, str, Any]]:
    """Yield each tensor's place, its name, and the tensor itself or its slice of a safetensors file."""
    if state_dict is not None:
        yield from (("state_dict", name, value) for name, value in state_dict.items())
        return
    for file in filter(os.path.isfile, files):  # transformers reports missing files
        if file.endswith(".safetensors"):
            with safe_open(file, "pt") as weights:
                names = weights.keys()
                yield from ((file, name, weights.get_slice(name)) for name in names)
        else:
            yield from ((file, name, value) for name, value in load_state_dict(file, map_location="cpu").items())


def check_shapes(model: PreTrainedModel, mismatched: Iterable[tuple[str, Any, Any]], *, others: bool = False) -> None:
    """Raise ValueError for norm parameters of another shape in the weights than in the model.

    `mismatched` holds name, shape in the weights, and shape in the model. The error is raised with
    `ignore_mismatched_sizes=True` too: a fresh gain in place of a trained one changes the model. With `others`, other
    tensors raise RuntimeError, as in transformers.
    """
    if _SKIPPED.get():
        return
    own = _norm_parameters(model)
    mismatched = sorted((name, list(got), list(expected)) for name, got, expected in mismatched)
    wrong = [found for found in mismatched if found[0] in own]
    if wrong:
        name, got, expected = wrong[0]
        what = f"of another shape in the weights ({shorten(name)} is {got}, expected {expected})"
        raise _disagreement(model, what, [name for name, _, _ in wrong])
    for name, got, expected in mismatched if others else ():
        raise RuntimeError(
            f"{config_file(model.config)} asks for {name} in shape {expected}, and the weights have it in {got} "
            f"({len(mismatched)} tensors in all). Restore the config.json or the weights that belong together"
        )


def check_loaded(model: PreTrainedModel, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """Raise ValueError for norm parameters that the weights lack, or that the scheme has no place for."""
    if _SKIPPED.get():
        return
    own = _norm_parameters(model)
    prefix = f"{model.base_model_prefix}."

    def ours(keys: Iterable[str]) -> list[str]:
        return sorted(key for key in keys if key in own or f"{prefix}{key}" in own or key.removeprefix(prefix) in own)

    for what, keys in (("missing from the weights", missing), ("in the weights but not in the scheme", unexpected)):
        if found := ours(keys):
            raise _disagreement(model, what, found)


def _norm_parameters(model: PreTrainedModel) -> set[str]:
    """Return the possible names of the norms' parameters, for any scheme."""
    return {".".join(parts) for parts in product(patched_layers(model), NORM_FIELDS, PARAMETERS)}


def _disagreement(model: PreTrainedModel, what: str, keys: list[str]) -> ValueError:
    scheme = {str(layer.scheme): None for layer in patched_layers(model).values()}
    return ValueError(
        f"{model.config._name_or_path or 'the checkpoint'}: {len(keys)} norm parameters are {what}, first "
        f"{keys[0]!r}. The config (config.json, or a qk_norm argument) has qk_norm = {' and '.join(scheme)}; loading "
        "would silently change the model. Restore the matching config.json or weights, or drop the argument"
    )


ROUNDING: Final = 0.01  # of a cast to 16 bits by another tool


def expect_eps(model: PreTrainedModel, has_eps: bool) -> None:
    """Let transformers load the ε in the weights, if they hold any; see `take_eps`.

    Raises ValueError for a knee with neither ε in the weights nor powers in the config.
    """
    for name, layer in patched_layers(model).items():
        config: Any = layer.config
        norms = [norm for norm in head_norms(layer).values() if norm.knee]
        if norms and not has_eps and config.qk_norm_powers is None and not _SKIPPED.get():
            raise ValueError(
                f"{config_file(config)} has a knee of {layer.scheme.knee:g} and no qk_norm_powers, the means that it "
                f"multiplies; nor do the weights hold eps for {name}. Restore the config.json that was saved with the "
                "weights"
            )
        for norm in norms:
            norm.expect_eps()


def take_eps(model: PreTrainedModel, missing: set[str]) -> None:
    """Compare the loaded ε of each norm with the config's, or take it if the config has no powers (versions 0.1, 0.2).

    `missing` are the tensors that the weights lack; an ε that the config makes up for is removed from it. Raises
    ValueError for an ε that contradicts the config, and for one that neither the config nor this process has.
    """
    for name, layer in patched_layers(model).items():
        config: Any = layer.config
        for norm_name, norm in head_norms(layer).items():
            if "eps" not in norm._buffers:
                continue
            key, in_config = f"{name}.{norm_name}.eps", config.qk_norm_powers is not None
            stored: Any = norm._buffers["eps"]
            absent = key in missing or stored.is_meta or not stored
            if in_config:
                missing.discard(key)
            if _SKIPPED.get():  # the caller compares it with the weights
                continue
            del norm._buffers["eps"]
            check_loaded(model, missing & {key}, ())
            if absent and not in_config:
                raise ValueError(
                    f"{key} of version 0.2 or older is not in this process's memory: load the checkpoint once as a "
                    "whole, without offloading and FSDP, and save it with save_pretrained"
                )
            if not in_config:
                norm.take_eps(stored)
            elif not absent:
                compare_eps(key, stored, norm, config)


def compare_eps(name: str, stored: torch.Tensor, norm: HeadNorm, config: Any) -> None:
    """Raise ValueError for a stored ε, of that `name`, unless it is the one that the norm has by its config."""
    if abs(float(stored) / float(norm.eps) - 1) > ROUNDING:
        raise ValueError(
            f"{name} is {float(stored):g} in the weights, and {float(norm.eps):g} by the knee and the "
            f"qk_norm_powers of {config_file(config)}. Restore the config.json that was saved with the weights"
        )
