"""Checks that loaded weights fit the scheme in the config."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any, Final

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import load_state_dict

from hf_qknorm.files.formatting import shorten
from hf_qknorm.model.attention import head_norms, patched_layers
from hf_qknorm.model.config_checks import config_file
from hf_qknorm.model.norms import NORM_FIELDS, shape_problem

TENSORS: Final = ("weight", "bias", "knee")  # of a norm
DTYPES_OF_TORCH: Final = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
DTYPES: Final = frozenset(DTYPES_OF_TORCH.values())


class UnpatchedClassError(ValueError):
    """Raised when a class of transformers gets a patched checkpoint or its config."""


def check_stored(model: PreTrainedModel, state_dict: dict[str, Any] | None, files: list[str] | None) -> None:
    """Raise ValueError for norm tensors that are not floating point of 16 bits or more, and for an impossible knee.

    The check comes before loading, which casts the weights: rounded gains would change the result.
    """
    norms = {name for layer in patched_layers(model).values() for name in head_norms(layer)}
    for where, name, tensor in _tensors(state_dict, files or []) if norms else ():
        *_, norm, field = ["", *name.split(".")]
        if norm not in norms or field not in TENSORS:
            continue
        sliced = hasattr(tensor, "get_dtype")
        dtype = tensor.get_dtype() if sliced else DTYPES_OF_TORCH.get(tensor.dtype, str(tensor.dtype))
        if dtype not in DTYPES:
            raise ValueError(
                f"{where}: {shorten(name)} has dtype {dtype}, expected one of {', '.join(sorted(DTYPES))}: norms are "
                "never quantised. Restore the weights"
            )
        if field == "knee" and (problem := shape_problem(tensor[...])):
            raise ValueError(f"{where}: {shorten(name)} {problem}")


def _tensors(state_dict: dict[str, Any] | None, files: list[str]) -> Iterator[tuple[str, str, Any]]:
    """Yield each tensor's place, its name, and the tensor itself or its slice of a safetensors file."""
    from safetensors import safe_open  # vLLM pickles this code by value, which breaks the class

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
    """Raise ValueError for norm tensors of another shape in the weights than in the model.

    `mismatched` holds name, shape in the weights, and shape in the model. The error is raised with
    `ignore_mismatched_sizes=True` too: a fresh gain in place of a trained one changes the model. With `others`, other
    tensors raise RuntimeError, as in transformers.
    """
    own = _norm_tensors(model)
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
    """Raise ValueError for norm tensors that the weights lack, or that the scheme has no place for."""
    own = _norm_tensors(model)
    prefix = f"{model.base_model_prefix}."

    def ours(keys: Iterable[str]) -> list[str]:
        return sorted(key for key in keys if key in own or f"{prefix}{key}" in own or key.removeprefix(prefix) in own)

    lacking, extra = ours(missing), ours(unexpected)
    if lacking or extra:
        what = "missing from the weights" if lacking else "in the weights but not in the scheme"
        raise _disagreement(model, what, lacking or extra)


def check_none_left(model: PreTrainedModel, unexpected: Iterable[str]) -> None:
    """Raise UnpatchedClassError for a norm's knee in the weights, in a layer that a model has without a scheme."""
    names, prefix = {name for name, _ in model.named_modules()}, f"{model.base_model_prefix}."
    for key in sorted(key for key in unexpected if key.endswith("_norm.knee")):
        layer = key.rpartition(".")[0].rpartition(".")[0]
        if {layer, f"{prefix}{layer}", layer.removeprefix(prefix)} & names:
            raise UnpatchedClassError(
                f"{_place(model)}: {key} is the weight of a norm that a {type(model).__name__} does not have, by its "
                "config. Restore the config.json that belongs to these weights"
            )


def _norm_tensors(model: PreTrainedModel) -> set[str]:
    """Return the possible names of the norms' tensors, for any scheme."""
    return {".".join(parts) for parts in product(patched_layers(model), NORM_FIELDS, TENSORS)}


def _disagreement(model: PreTrainedModel, what: str, keys: list[str]) -> ValueError:
    scheme = {str(layer.scheme): None for layer in patched_layers(model).values()}
    return ValueError(
        f"{_place(model)}: {len(keys)} norm tensors are {what}, first {keys[0]!r}. The config (config.json, or a "
        f"qk_norm argument) has qk_norm = {' and '.join(scheme)}; loading would silently change the model. Restore the "
        "matching config.json or weights, or drop the argument"
    )


def _place(model: PreTrainedModel) -> str:
    name = model.config._name_or_path
    return "the checkpoint" if name in ("", "None") else name  # "None": transformers' name of from_pretrained(None)
