"""`convert_checkpoint`: a checkpoint on the disk or the Hub to one with a scheme, written whole or not at all.

The weights pass through shard by shard; a model is built only to calibrate it.
"""

from __future__ import annotations

import copy
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_qknorm.attention import TYPE_PREFIX, head_norms, patched_layers
from hf_qknorm.checkpoint_files import REPORT
from hf_qknorm.convert.calibrate import MAX_TOKENS, METHODS, calibrate
from hf_qknorm.convert.plan import Plan, check_exact_fold, converted_config, make_plan, new_tensors, stored_name
from hf_qknorm.convert.report import Calibration
from hf_qknorm.convert.shards import Weights, copy_file
from hf_qknorm.convert.source import Source, check_readable, open_source
from hf_qknorm.convert.text import CHARACTERS, check_batches, check_text, load_text, tokenize
from hf_qknorm.convert.trained import load_tokenizer
from hf_qknorm.destinations import check_folder, check_new
from hf_qknorm.families import check_scheme, family_of
from hf_qknorm.files import hub_name, new_folder, user_path
from hf_qknorm.hub.standalone import carry_code
from hf_qknorm.patch import patch_model
from hf_qknorm.scheme import Scheme


def plan_conversion(
    src: str | Path,
    dst: str | Path,
    scheme: Scheme | str | Mapping[str, Any] = "qk_norm_cap",
    *,
    method: str | None = None,
    overwrite: bool = False,
    allow_pickle: bool = False,
) -> Plan:
    """Everything that `convert_checkpoint` checks before it writes, and what it would do; writes nothing.

    `method` is that of the calibration, None without one. Raises what `convert_checkpoint` raises before it writes.
    """
    destination = user_path(dst, "dst")
    check_new(destination, overwrite=overwrite)
    with _opened(src, scheme, method, allow_pickle) as (source, resolved):
        check_folder(destination, overwrite=overwrite, sources=[source.folder])
        return make_plan(source, destination, resolved, *new_tensors(source, resolved, method))


def convert_checkpoint(
    src: str | Path,
    dst: str | Path,
    scheme: Scheme | str | Mapping[str, Any] = "qk_norm_cap",
    *,
    calibration: Any = None,
    method: str = "fit",
    max_loss_increase: float | None = None,
    standalone: bool = False,
    overwrite: bool = False,
    allow_pickle: bool = False,
) -> Calibration | None:
    """Convert the checkpoint `src` (a folder or a Hub name) to `scheme`, into the new folder `dst`.

    With `calibration` (what `calibrate` takes as data) the gains are fitted by `method`, and the report is returned and
    saved beside the weights; without it they are fresh, and the weights stream through without a model being built.
    Tokenizer, generation config, templates, licence and card travel along, and with `standalone` the code that runs it
    with torch and transformers alone, as `add_standalone` gives it. `dst` appears at once when all is written; one that
    is there is replaced only with `overwrite`, and only where it is a checkpoint and holds nothing else. Only
    safetensors is read, unless `allow_pickle`.

    Raises ValueError for a source, scheme or tokenizer that can't be converted, naming the file, for too little text,
    for a loss (nats) that rose by more than `max_loss_increase`, and for an empty `dst`; FileExistsError for a
    destination that is there and not to be replaced, is the working directory, or holds the source or the calibration
    text; OSError, naming the file, for what can't be read or written. Nothing is written then.
    """
    if max_loss_increase is not None and calibration is None:
        raise ValueError("max_loss_increase is judged on text: pass calibration= as well")
    if max_loss_increase is not None and not math.isfinite(max_loss_increase):
        raise ValueError(f"max_loss_increase={max_loss_increase} is no limit: expected a finite number, or None")
    if isinstance(calibration, str | Path):
        check_text(str(calibration))
    used = None if calibration is None else method
    destination = user_path(dst, "dst")
    check_new(destination, overwrite=overwrite)
    with _opened(src, scheme, used, allow_pickle) as (source, resolved):
        check = partial(check_folder, destination, overwrite=overwrite, sources=[source.folder, calibration])
        check()
        new, removed = new_tensors(source, resolved, used)
        _check_space(destination, make_plan(source, destination, resolved, new, removed).size)
        report = None
        if calibration is not None:
            report, values = _calibrated(source, resolved, calibration, method)
            dataset = hub_name(calibration) if isinstance(calibration, str) else None
            report = replace(report, base_model=hub_name(source.name), dataset=dataset)
            _check_loss(report, max_loss_increase)
            new |= {name: replace(new[name], make=value.detach) for name, value in values.items()}
        with new_folder(destination, check) as folder:
            _write_settings(folder, source, resolved, standalone=standalone)
            if report is not None:
                report.save(folder / REPORT)
            source.weights.rewrite(folder, new, removed)
            Weights(folder)  # what was written is whole
            source.check_unchanged()
        return report


def _write_settings(folder: Path, source: Source, scheme: Scheme, *, standalone: bool) -> None:
    """Write all but the weights. Raises ValueError where transformers could not read it."""
    for file in source.files:
        (folder / file).parent.mkdir(exist_ok=True)
        copy_file(source.folder / file, folder / file)
    config = converted_config(source, scheme)
    if standalone:
        carry_code(config)
    config.save_pretrained(folder)
    check_readable(folder, source.folder)


@contextmanager
def _opened(src: str | Path, scheme: Any, method: str | None, allow_pickle: bool) -> Iterator[tuple[Source, Scheme]]:
    """The source, and the scheme as it is for this family, once all that can be refused has been."""
    if method is not None and method not in METHODS:
        raise ValueError(f"unknown method {method!r}: expected one of {', '.join(METHODS)}")
    scheme = Scheme.of(scheme)
    with open_source(src, allow_pickle=allow_pickle) as source:
        if getattr(source.config, "quantization_config", None) is not None:
            raise ValueError(
                f"{source.folder / 'config.json'}: this checkpoint is quantised. Convert the one in full precision, "
                "then quantise that"
            )
        model_type = source.config.model_type
        if model_type.startswith(TYPE_PREFIX):
            raise ValueError(
                f"{source.name} is converted already ({source.config.scheme}): convert the original checkpoint instead"
            )
        try:
            scheme = scheme.resolve(family_of(source.config).norm)
            check_scheme(model_type, source.config, scheme)
        except ValueError as error:
            raise ValueError(f"{source.folder / 'config.json'}: {error}") from error
        source.check_complete()
        if not scheme.pre_norm and method is None:
            check_exact_fold(source, scheme)
        yield source, scheme


def _calibrated(source: Source, scheme: Scheme, calibration: Any, method: str) -> tuple[Calibration, dict[str, Tensor]]:
    """Load, patch and calibrate the model; the report, and every value that is new or may have moved, by its name."""
    if isinstance(calibration, str | Path):  # read before the weights are: there may be too little
        text = load_text(str(calibration), limit=CHARACTERS * MAX_TOKENS)
        ids = tokenize(load_tokenizer(source.folder), text)[:MAX_TOKENS]
        check_batches([{"input_ids": ids[None]}], source.config)
        calibration = [{"input_ids": ids}]
    places = {"device_map": "auto"} if torch.cuda.is_available() else {}
    config = copy.deepcopy(source.config)
    model = source.model_class.from_pretrained(
        source.weights.folder, config=config, dtype="auto", use_safetensors=True, **places
    )
    model.name_or_path = ""  # a model with a name is told to be calibrated, which is next
    patch_model(model, scheme)
    model.name_or_path = str(source.folder)  # where its tokenizer is
    report = calibrate(model, calibration, method=method)
    values: dict[str, Tensor] = {}
    for name, layer in patched_layers(model).items():
        parts = [*head_norms(layer)]
        if method == "fit_qk" or not scheme.pre_norm:
            parts += layer.family.style.weights
        prefix = stored_name(source.weights, model.base_model_prefix, name, layer) if parts else ""
        for part in parts:
            for kind, parameter in layer.get_submodule(part).named_parameters():
                values[f"{prefix}.{part}.{kind}"] = parameter.detach()
    return report, values


def _check_loss(report: Calibration, most: float | None) -> None:
    if most is None or report.loss is None or report.base_loss is None:
        return
    rise = report.loss - report.base_loss
    if not rise <= most or math.isnan(rise):
        raise ValueError(
            f"the conversion raises the loss by {rise:.4f} nats ({report.base_loss:.4f} to {report.loss:.4f}), more "
            f'than max_loss_increase={most:g}: nothing was written. method="fit_qk" keeps more, as do '
            'gain="per_head" and bias=True in the scheme, more text, or queries alone (q_norm)'
        )


def _check_space(dst: Path, size: int) -> None:
    place = next(path for path in Path(os.path.abspath(dst)).parents if path.exists())
    free = shutil.disk_usage(place).free
    if free < size:
        raise OSError(f"{dst} needs {size / 1e9:.2f} GB, and {place} has {free / 1e9:.2f} GB free: nothing was written")
