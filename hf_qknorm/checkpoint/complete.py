"""Check that a checkpoint holds every tensor of its model, by names, shapes and dtypes alone.

transformers matches the names by loading the model on the meta device: it renames, joins and splits stored tensors,
ties weights, and knows which ones are optional. No value of a tensor is read.
"""

from __future__ import annotations

import copy
import logging
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.utils import logging as transformers_logging

from hf_qknorm.checkpoint.safetensors_files import Tensors
from hf_qknorm.files.formatting import shorten
from hf_qknorm.files.names import CONFIG, INDEX, SINGLE
from hf_qknorm.model.load_checks import skip_load_checks

# Of norms of heads in an attention layer
NORM = re.compile(r"(?:^|\.)(?:[qkv]|query|key|value)_(?:layer)?norm\.[^.]+$")
REPORTER = logging.getLogger("transformers.modeling_utils")


def check_complete(
    model_class: type[PreTrainedModel], config: PretrainedConfig, tensors: Tensors, folder: Path
) -> tuple[str, ...]:
    """Check that `tensors`, of the checkpoint in `folder`, fit the model; return the names that it ignores.

    Of a quantised model only the norms of heads are checked: its quantiser decides on the other tensors.

    Raises ValueError, naming file and tensor, for a tensor that is missing, of another shape, not floating point where
    the model computes with it, stored twice, or of a norm that the model does not have; and naming config.json, if no
    model can be built from it.
    """
    comparison = _Comparison(model_class, config, tensors, folder)
    if not comparison.quantised:
        comparison.check_missing()
    comparison.check_norms()
    if not comparison.quantised:
        comparison.check_shapes(comparison.wrong_shape, f" ({comparison.class_name})")
        comparison.check_twice()
    comparison.check_dtypes()
    return comparison.ignored


class _Comparison:
    """Stored tensors compared with a model's: `read_as` maps each stored name to the model's own."""

    def __init__(self, model_class: Any, config: PretrainedConfig, tensors: Tensors, folder: Path) -> None:
        self.tensors, self.folder, self.config = tensors, folder, config
        single = all(tensor.file == SINGLE for tensor in tensors.values())
        self.config_file, self.weights_file = folder / CONFIG, folder / (SINGLE if single else INDEX)
        self.quantised = getattr(config, "quantization_config", None) is not None
        self.class_name = model_class.__name__
        plain = copy.deepcopy(config)
        if self.quantised:
            del plain.quantization_config
        try:
            with torch.device("meta"):
                model: nn.Module = model_class(copy.deepcopy(plain))  # the constructor writes to it
        except Exception as error:  # a config's fields can be wrong in any way
            if isinstance(error, ValueError) and CONFIG in str(error):
                raise
            raise ValueError(
                f"{self.config_file}: no {self.class_name} can be built from it "
                f"({type(error).__name__}: {shorten(str(error))})"
            ) from error
        self.expected = {name: (tuple(value.shape), value.dtype) for name, value in model.state_dict().items()}
        self.modules = {name for name, _ in model.named_modules()}
        self.read_as, self.joined = match_names(model, tensors)
        info = self._loading_info(model_class, plain)
        self.missing = [name for name in self.expected if name in info["missing_keys"]]
        found = {name: tuple(shape) for name, shape, _ in info["mismatched_keys"]}
        self.wrong_shape = {name: found[name] for name in self.expected if name in found}
        self.ignored = tuple(name for name, key in self.read_as.items() if key in info["unexpected_keys"])

    def _loading_info(self, model_class: Any, config: PretrainedConfig) -> dict[str, Any]:
        """Return transformers' loading info: the names that are missing, unexpected, or of another shape."""
        try:
            return _load(model_class, config, self.tensors)
        except RuntimeError as error:
            keys = sorted({self.read_as[name] for name in self.joined})
            # transformers does not name the tensors that it can't join: find the first with which loading fails
            at = bisect_left(range(len(keys) - 1), True, key=lambda i: self._fails(model_class, config, keys[: i + 1]))
            names = [name for name, key in self.read_as.items() if key in keys[at : at + 1]] or [*self.tensors]
            shapes = Counter(self.tensors[name].shape for name in names)
            odd = min(names, key=lambda name: shapes[self.tensors[name].shape])
            listed = ", ".join(f"{count} of {list(shape)}" for shape, count in shapes.most_common(4))
            raise ValueError(
                f"{self.folder / self.tensors[odd].file}: {odd} does not fit with the others that are joined as "
                f"{self.read_as[odd]}. Some of these are missing, or have another shape: there are {listed}. Is the "
                "download complete?"
            ) from error

    def _fails(self, model_class: Any, config: PretrainedConfig, keys: list[str]) -> bool:
        try:
            _load(model_class, config, {name: self.tensors[name] for name in self.joined if self.read_as[name] in keys})
        except RuntimeError:
            return True
        return False

    def _stored(self, key: str) -> tuple[Path, str]:
        """Return the file and stored name of a model's tensor; the first ones of several joined tensors."""
        names = [name for name, read in self.read_as.items() if read == key]
        if not names:
            return self.weights_file, key
        first = min(names, key=dot_natural_key)
        joined = f"{key}, joined from {len(names)} tensors, first {first}," if len(names) > 1 else first
        return self.folder / self.tensors[first].file, joined

    def check_norms(self) -> None:
        scheme = getattr(self.config, "scheme", None)
        setting = f" (qk_norm = {scheme})" if scheme is not None else ""
        self.check_shapes(filter(NORM.search, (*self.missing, *self.wrong_shape)), setting)
        for name in self.ignored:
            key = self.read_as[name]
            if NORM.search(key) and key.rsplit(".", 2)[0] in self.modules:
                raise ValueError(
                    f"{self.folder / self.tensors[name].file}: {name} is the weight of a norm that a {self.class_name} "
                    f"does not have, by {self.config_file}{setting}. Restore the config.json "
                    "that belongs to these weights"
                )

    def check_missing(self) -> None:
        missing = [name for name in self.missing if not NORM.search(name)]
        if not missing:
            return
        layer, layers = re.match(r".*?\.\d+\.", missing[0]), ""
        if layer and not any(name.startswith(layer.group()) for name in self.read_as.values()):
            layers = f"num_hidden_layers={getattr(self.config, 'num_hidden_layers', None)}, "
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(
            f"{self.weights_file}: no entry for {missing[0]} {list(self.expected[missing[0]][0])}{more}, which "
            f"{self.config_file} asks for ({layers}{self.class_name}). transformers would fill in random values. Is "
            "the download complete? If it is, correct the config, or name the class of the weights under "
            '"architectures"'
        )

    def check_shapes(self, keys: Iterable[str], reason: str) -> None:
        """Raise ValueError for the first of `keys`, which are missing or of another shape than `reason` asks for."""
        for key in keys:
            file, name = self._stored(key)
            problem = f"has shape {list(self.wrong_shape[key])}" if key in self.wrong_shape else "is not there"
            raise ValueError(
                f"{file}: {name} {problem}, expected {list(self.expected[key][0])}, as {self.config_file} asks "
                f"for{reason}. Restore the config.json or the weights that belong together"
            )

    def check_twice(self) -> None:
        seen: dict[str, str] = {}
        for name, key in self.read_as.items():
            if key in self.expected and name not in self.joined and seen.setdefault(key, name) != name:
                raise ValueError(
                    f"{self.folder / self.tensors[name].file}: {name} and {seen[key]} are both read as {key}: the "
                    "checkpoint mixes two saves. Save the model again"
                )

    def check_dtypes(self) -> None:
        for name, key in self.read_as.items():
            computed = key in self.expected and self.expected[key][1].is_floating_point
            tensor = self.tensors[name]
            if computed and not tensor.is_floating_point and (NORM.search(key) or not self.quantised):
                raise ValueError(
                    f"{self.folder / tensor.file}: {name} is stored as {tensor.dtype}, expected F16, BF16, F32 or F64, "
                    "as the model computes with it: dequantise it first"
                )


def _load(model_class: Any, config: PretrainedConfig, tensors: Tensors) -> dict[str, Any]:
    """Load the model on the meta device, without transformers' report and progress bar; return its loading info."""
    shapes = {name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors.items()}
    load: Any = PreTrainedModel.from_pretrained.__func__  # a patched class's own has less precise errors
    options = {"device_map": "meta", "dtype": torch.float32, "ignore_mismatched_sizes": True}
    bars, disabled = transformers_logging.is_progress_bar_enabled(), REPORTER.disabled
    REPORTER.disabled = True
    transformers_logging.disable_progress_bar()
    try:
        with skip_load_checks():
            _, info = load(model_class, None, config=config, state_dict=shapes, output_loading_info=True, **options)
    finally:
        REPORTER.disabled = disabled
        if bars:
            transformers_logging.enable_progress_bar()
    return dict(info)


def match_names(model: Any, tensors: Tensors) -> tuple[dict[str, str], set[str]]:
    """Return the model's name of each stored tensor, and the stored names that it joins or splits."""
    conversions, expected = get_model_conversion_mapping(model), model.state_dict()
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    found = {}
    for name in sorted(tensors, key=dot_natural_key):  # some renamings depend on earlier ones
        key, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, expected)
        found[name] = (name, None) if key not in expected and name in expected else (key, pattern)
    return {name: key for name, (key, _) in found.items()}, {name for name, (_, pattern) in found.items() if pattern}
