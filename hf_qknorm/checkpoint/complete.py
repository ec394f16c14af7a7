"""Whether weights hold every tensor that a model asks for, checked by names, shapes and dtypes alone.

transformers does the matching, by loading the model on the meta device: it renames, joins and splits stored tensors,
ties weights, and knows which ones may be absent. No value of a tensor is read.
"""

from __future__ import annotations

import copy
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.utils import logging as transformers_logging

from hf_qknorm.checkpoint.safetensors_files import New, Stored
from hf_qknorm.files.formatting import shorten
from hf_qknorm.files.names import INDEX, SINGLE
from hf_qknorm.model.load_checks import checked_elsewhere

Tensors = Mapping[str, Stored | New]
NORM = re.compile(r"(?:^|\.)(?:[qkv]|query|key|value)_(?:layer)?norm\.[^.]+$")  # of heads, in an attention layer
REPORTER = logging.getLogger("transformers.modeling_utils")


def check_complete(
    model_class: type[PreTrainedModel], config: PretrainedConfig, tensors: Tensors, folder: Path
) -> tuple[str, ...]:
    """Check that `tensors`, of the checkpoint in `folder`, are all that the model asks for.

    Returns the names of those that the model does not read. Of a quantised model only the norms of heads are checked:
    the shapes and dtypes of its other tensors are the quantiser's.

    Raises ValueError, naming file and tensor, for one that is missing, of another shape, of a dtype that is no floating
    point where the model computes in it, stored twice, or a norm of heads that the model does not have; and naming
    config.json, if no model can be built from it.
    """
    fit = _Fit(model_class, config, tensors, folder)
    if not fit.quantised:
        fit.check_missing()
    fit.check_norms()
    if not fit.quantised:
        fit.check_shapes()
        fit.check_twice()
    fit.check_dtypes()
    return fit.unused


class _Fit:
    """How tensors fit a model: what it reads each one as, and what is wrong with them, by transformers' account."""

    def __init__(
        self, model_class: type[PreTrainedModel], config: PretrainedConfig, tensors: Tensors, folder: Path
    ) -> None:
        self.tensors, self.folder, self.config = tensors, folder, config
        self.quantised = getattr(config, "quantization_config", None) is not None
        self.kind = model_class.__name__
        plain = copy.deepcopy(config)
        if self.quantised:
            del plain.quantization_config
        model = self._built(model_class, plain)
        self.asked = {name: (tuple(value.shape), value.dtype) for name, value in model.state_dict().items()}
        self.modules = {name for name, _ in model.named_modules()}
        self.read_as, self.joined = _renamed(model, tensors)
        info = self._loaded(model_class, plain)
        self.missing = [name for name in self.asked if name in info["missing_keys"]]
        found = {name: tuple(got) for name, got, _ in info["mismatched_keys"]}
        self.other_shape = {name: found[name] for name in self.asked if name in found}
        unexpected = info["unexpected_keys"]
        self.unused = tuple(name for name, key in self.read_as.items() if key in unexpected)

    def _built(self, model_class: type[PreTrainedModel], config: PretrainedConfig) -> nn.Module:
        try:
            with torch.device("meta"):
                return model_class(copy.deepcopy(config))  # to which it writes
        except Exception as error:  # a config's fields can be wrong in any way
            raise ValueError(
                f"{self._config_file}: no {self.kind} can be built from it "
                f"({type(error).__name__}: {shorten(str(error))})"
            ) from error

    def _loaded(self, model_class: Any, config: PretrainedConfig) -> dict[str, Any]:
        """transformers' account of a loading: the names that are missing, unexpected, or of another shape."""
        try:
            return _load(model_class, config, self.tensors)
        except RuntimeError as error:
            keys = sorted({self.read_as[name] for name in self.joined})
            while len(keys) > 1:  # transformers does not say which ones it can't join: halve them
                half = keys[: len(keys) // 2]
                keys = half if self._fails(model_class, config, half) else keys[len(half) :]
            names = [name for name, key in self.read_as.items() if key in keys] or [*self.tensors]
            shapes = Counter(tuple(self.tensors[name].shape) for name in names)
            odd = min(names, key=lambda name: shapes[tuple(self.tensors[name].shape)])
            listed = ", ".join(f"{count} of {list(shape)}" for shape, count in shapes.most_common(4))
            raise ValueError(
                f"{self.folder / self.tensors[odd].file}: {odd} does not fit with the others that are joined as "
                f"{', '.join(keys)}, of which some are missing, or have another shape: there are {listed}. Is the "
                "download complete?"
            ) from error

    def _fails(self, model_class: Any, config: PretrainedConfig, keys: list[str]) -> bool:
        try:
            _load(model_class, config, {name: self.tensors[name] for name in self.joined if self.read_as[name] in keys})
        except RuntimeError:
            return True
        return False

    @property
    def _where(self) -> Path:
        files = {tensor.file for tensor in self.tensors.values()}
        return self.folder / (SINGLE if files == {SINGLE} else INDEX)

    @property
    def _config_file(self) -> Path:
        return self.folder / "config.json"

    def _stored(self, key: str) -> tuple[Path, str]:
        """The file of what is read as a model's tensor, and its name there, or those of the first that are joined."""
        names = [name for name, read in self.read_as.items() if read == key]
        if not names:
            return self._where, key
        first = min(names, key=dot_natural_key)
        joined = f"{key}, joined from {len(names)} tensors, first {first}," if len(names) > 1 else first
        return self.folder / self.tensors[first].file, joined

    def check_norms(self) -> None:
        wrong = {name: self.asked[name][0] for name in (*self.missing, *self.other_shape) if NORM.search(name)}
        for name, shape in wrong.items():
            file, stored = self._stored(name)
            got = f"has shape {list(self.other_shape[name])}" if name in self.other_shape else "is not there"
            raise ValueError(
                f"{file}: {stored} {got}, expected {list(shape)}, as {self._config_file} asks for{self._scheme}. "
                "Restore the config.json or the weights that belong together"
            )
        for name in self.unused:
            key = self.read_as[name]
            if NORM.search(key) and key.rsplit(".", 2)[0] in self.modules:
                raise ValueError(
                    f"{self.folder / self.tensors[name].file}: {name} is the weight of a norm that a {self.kind} does "
                    f"not have, by {self._config_file}{self._scheme}. Restore the config.json that belongs to these "
                    "weights"
                )

    @property
    def _scheme(self) -> str:
        scheme = getattr(self.config, "scheme", None)
        return f" (qk_norm = {scheme})" if scheme is not None else ""

    def check_missing(self) -> None:
        missing = [name for name in self.missing if not NORM.search(name)]
        if not missing:
            return
        first = missing[0]
        layer = re.match(r".*?\.\d+\.", first)
        beyond = layer and not any(name.startswith(layer.group()) for name in self.read_as.values())
        reason = f"num_hidden_layers={getattr(self.config, 'num_hidden_layers', None)}, {self.kind}"
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(
            f"{self._where}: no entry for {first} {list(self.asked[first][0])}{more}, which {self._config_file} asks "
            f"for ({reason if beyond else self.kind}). transformers would make up its values. Is the download "
            'complete? If it is, correct the config, or name the class that the weights are of under "architectures"'
        )

    def check_shapes(self) -> None:
        for key, got in self.other_shape.items():
            file, name = self._stored(key)
            raise ValueError(
                f"{file}: {name} has shape {list(got)}, expected {list(self.asked[key][0])}, as {self._config_file} "
                f"asks for ({self.kind}). Restore the config.json or the weights that belong together"
            )

    def check_twice(self) -> None:
        seen: dict[str, str] = {}
        for name, key in self.read_as.items():
            if key in self.asked and name not in self.joined and seen.setdefault(key, name) != name:
                raise ValueError(
                    f"{self.folder / self.tensors[name].file}: {name} and {seen[key]} are both read as {key}: the "
                    "checkpoint mixes two saves. Save the model again"
                )

    def check_dtypes(self) -> None:
        for name, key in self.read_as.items():
            computed = key in self.asked and self.asked[key][1].is_floating_point
            tensor = self.tensors[name]
            if computed and not tensor.is_floating_point and (NORM.search(key) or not self.quantised):
                raise ValueError(
                    f"{self.folder / tensor.file}: {name} is stored as {tensor.dtype}, expected F16, BF16, F32 or F64, "
                    "as the model computes with it: dequantise it first"
                )


def _load(model_class: Any, config: PretrainedConfig, tensors: Tensors) -> dict[str, Any]:
    shapes = {name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors.items()}
    load: Any = PreTrainedModel.from_pretrained.__func__  # not a patched class's own, which says less of what is wrong
    options = {"device_map": "meta", "dtype": torch.float32, "ignore_mismatched_sizes": True}
    with _quiet(), checked_elsewhere():
        _, info = load(model_class, None, config=config, state_dict=shapes, output_loading_info=True, **options)
    return dict(info)


def _renamed(model: Any, tensors: Tensors) -> tuple[dict[str, str], set[str]]:
    """What the model reads each stored tensor as, and the names of those that it joins or splits."""
    conversions = get_model_conversion_mapping(model)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    asked, prefix = model.state_dict(), model.base_model_prefix
    read_as, joined = {}, set()
    for name in sorted(tensors, key=dot_natural_key):  # some renamings depend on those before
        key, pattern = rename_source_key(name, renamings, converters, prefix, asked)
        if key not in asked and name in asked:
            key, pattern = name, None
        read_as[name] = key
        if pattern is not None:
            joined.add(name)
    return read_as, joined


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' report of a loading and its progress bar."""
    bars = transformers_logging.is_progress_bar_enabled()
    REPORTER.addFilter(_never)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        REPORTER.removeFilter(_never)
        if bars:
            transformers_logging.enable_progress_bar()


def _never(record: logging.LogRecord) -> bool:
    return False
