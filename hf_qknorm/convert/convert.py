"""`convert_checkpoint`: load a checkpoint, patch and calibrate its model, and save it whole or not at all."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hf_qknorm.calibration.calibrate import MAX_TOKENS, calibrate, check_inputs
from hf_qknorm.calibration.knees import Knee, resolve_knee
from hf_qknorm.checkpoint import Source, copied_files, copy_files, load_model, open_source, quiet_transformers
from hf_qknorm.convert.card import write_card
from hf_qknorm.convert.mtp import mtp_tensors, state_with_mtp
from hf_qknorm.families import family_of
from hf_qknorm.families.counterparts import counterpart
from hf_qknorm.files.atomic_io import new_folder
from hf_qknorm.files.names import CONFIG, other_files
from hf_qknorm.files.paths import check_folder, check_space, hub_name, user_path
from hf_qknorm.measure.batches import Batches, check_batches
from hf_qknorm.measure.predictions import require_causal
from hf_qknorm.measure.text import batches_for, check_text, names_a_path
from hf_qknorm.model.attention import head_norms, patched_layers
from hf_qknorm.model.derived import QKNormModel
from hf_qknorm.model.fold import is_exact
from hf_qknorm.model.placement import SHARD, check_finite, is_offloaded, memory_limits, placement
from hf_qknorm.model.record import own_tensors, set_record, write_record
from hf_qknorm.model.towers import pick_tower
from hf_qknorm.patch import patch_model
from hf_qknorm.reports.report import Calibration
from hf_qknorm.scheme import Scheme
from hf_qknorm.standalone.generate import add_standalone, check_standalone

SEQUENCES = 8  # in a forward pass
TRIED_TOKENS = 4096  # of a text, in a dry run


def convert_checkpoint(
    src: str | Path,
    dst: str | Path,
    scheme: Scheme | str | Mapping[str, Any] = "qk_norm_cap",
    *,
    data: Any = None,
    knee: Knee | None = None,
    max_loss_increase: float | None = None,
    length: int | None = None,
    max_tokens: int | None = None,
    max_memory: int | str | Mapping[Any, Any] | None = None,
    standalone: bool = True,
    exportable: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
) -> Calibration | None:
    """Convert the checkpoint `src` (a folder or a Hub name) to `scheme`, into the new folder `dst`.

    With `data` (texts or batches, as for `calibrate`) the model is calibrated with `knee` and `exportable`;
    the report is returned, and saved beside the weights. Without it gains are fresh. Texts are cut into sequences of
    `length` tokens, by default 256, or half of learned positions, and used up to `max_tokens`, by default 262,144.

    The model is loaded in the dtype of its config, onto GPUs first. `max_memory` limits the weights in memory, in bytes
    or as "8GB" (or accelerate's mapping from devices to sizes). Layers that do not fit, by default into what is free,
    are read from files in each forward pass; the result has the same bits.

    Of a multimodal model the text tower is converted, without stand-alone code and card.

    Tokenizer, processor, generation config, templates and licence are copied. A model card is written; the source's is
    kept as README.original.md. `standalone` adds the code that runs the model without hf_qknorm, as `add_standalone`
    does. `dst` appears once it is complete. With `overwrite` an existing folder is replaced if it holds a checkpoint
    and nothing else. With `dry_run` the plan is printed, and nothing is written: the layers, the tensors that are
    added, the size, and the files. Of the weights, headers alone are read for it.

    Raises ValueError, naming the file, for a source, scheme or tokenizer that can't be converted, weights that are
    pickled, damaged, missing, quantised or not finite, a model whose stand-alone code can't be made, too little text,
    an argument of the calibration without data, and a loss that rises by more than `max_loss_increase` nats;
    FileExistsError for a destination that may not be replaced, is or holds the source or the text, or is the working
    directory or a parent of it; OSError, naming the file or checkpoint, for a failed read, write or download. After an
    error nothing is written.

    >>> report = qk.convert_checkpoint("llama", "converted", "qk_norm", data=texts, knee=0)
    >>> report.scheme.q
    'rms'
    """
    scheme = Scheme.of(scheme).resolve()
    chosen: dict[str, Any] = {"knee": knee, "max_loss_increase": max_loss_increase, "exportable": exportable}
    if data is None:
        for name, value in {"length": length, "max_tokens": max_tokens, **chosen}.items():
            if value is not None and value is not False:  # a knee of 0 is an argument too
                raise ValueError(f"{name} is for a calibration, on text: pass data= (--data TEXT) as well")
    else:
        resolve_knee(scheme, **chosen)  # raises for wrong arguments
        check_text(data)
    if max_memory is not None:
        memory_limits(max_memory)
    destination = user_path(dst, "dst")
    check_folder(destination, overwrite=overwrite, sources=[src, data])
    source = open_source(src)
    _patch_on_meta(source, scheme, standalone, exportable)
    max_tokens = MAX_TOKENS if max_tokens is None else max_tokens
    max_tokens = min(max_tokens, TRIED_TOKENS) if dry_run else max_tokens
    batches = None
    if names_a_path(data) or not (data is None or dry_run):  # a dry run would use up an iterator
        batches = _batches(source, data, length, max_tokens)
    plan, size = _plan(source, destination)
    if dry_run:
        print(plan)  # noqa: T201
        return None
    check_space(destination, size)
    check = partial(check_folder, destination, overwrite=overwrite, sources=[source.folder, data])
    with new_folder(destination, check) as folder:
        placed = placement(source.folder, max_memory, folder.parent / "offload")
        model = load_model(source, **placed)
        check_finite(model, source.folder)
        model.name_or_path = ""  # without a name, patch_model does not warn that the model needs a calibration
        patch_model(model, scheme)
        report = None
        if batches is not None:
            part = _patched_part(model)
            report = calibrate(part, batches, max_tokens=max_tokens, **chosen)
            report = replace(report, base_model=hub_name(source.name))
            set_record(part, report.to_dict())
            check_finite(part, f"{source.folder}, calibrated")
        elif not scheme.pre_norm and not is_exact(model):
            raise ValueError(
                "pre_norm=False can't fold the biases of norms and projections exactly: their right values depend on "
                "the text that the model sees. Pass data= (--data TEXT)"
            )
        limit = placed.get("max_memory", {}).get("cpu", SHARD)
        _write(model, source, folder, standalone=standalone, shard=min(limit, SHARD))
        return report


def _patch_on_meta(source: Source, scheme: Scheme, standalone: bool, exportable: bool) -> None:
    """Patch the source's model without its weights, as a trial: raise ValueError if it can't be converted."""
    config, folder, model = source.config, source.folder, source.model
    if model is None:
        raise ValueError(
            f"{folder / CONFIG}: this checkpoint is quantised. Convert the one in full precision, then quantise that"
        )
    for held in (module.config for module in model.modules() if isinstance(module, QKNormModel)):
        raise ValueError(
            f"{source.name} is converted already ({held.scheme}): convert the original checkpoint instead. Take the "
            f"norms off one that was trained on: hf-qknorm export {source.name} DST --data TEXT"
        )
    if scheme.changes_nothing:
        raise ValueError("this scheme changes nothing, so that there is nothing to convert: give another one")
    model.name_or_path = ""
    try:
        picked = pick_tower(model, None)
        family_of(config if picked is None else getattr(config, picked[1]), scheme)
        patch_model(model, replace(scheme, pre_norm=True))  # to fold a norm takes the weights
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error
    if standalone and picked is not None:
        raise ValueError(
            f"no stand-alone code can be made for {config.model_type}, of which {picked[0]} alone is patched: convert "
            "without it, by standalone=False (--no-standalone)"
        )
    if standalone:
        check_standalone(config.model_type, scheme)
    if exportable:
        counterpart(_patched_part(model).config)  # raises without one


def _patched_part(model: Any) -> Any:
    """The patched model: the tower of a multimodal one, else the whole."""
    return next(module for module in model.modules() if isinstance(module, QKNormModel))


def _batches(source: Source, data: Any, length: int | None, max_tokens: int) -> Batches:
    """Return the batches of a calibration. Raises ValueError for ones that the model can't be calibrated on."""
    part = _patched_part(source.model)
    if part.config.is_encoder_decoder:
        require_causal(part.config)
    batches = batches_for(part, data, source.folder, batch=SEQUENCES, length=length, max_tokens=max_tokens)
    check_batches(batches, part.config)
    check_inputs(part, batches)
    return batches


def _plan(source: Source, destination: Path) -> tuple[str, int]:
    """Return the plan of a conversion as text, and the size of its result in bytes."""
    model, part = source.model, _patched_part(source.model)
    layers, tensors = patched_layers(model), own_tensors(model)
    norms = [f"{name}.{norm}" for name, layer in layers.items() for norm in head_norms(layer)]
    added = [name for name in tensors if name.rpartition(".")[0] in norms]
    count = sum(tensors[name].numel() for name in added)
    stored = sum(path.stat().st_size for path in source.folder.glob("*.safetensors"))
    itemsize = getattr(model.config.dtype, "itemsize", None) or model.dtype.itemsize
    copied = [str(file) for file in copied_files(source)]
    numbers = sum(tensor.numel() for tensor in tensors.values())
    size = (numbers + sum(math.prod(x.get_shape()) for _, x in mtp_tensors(model, source.folder))) * itemsize
    size += sum((source.folder / file).stat().st_size for file in copied)
    lines = {
        "source": f"{source.folder} ({source.config.model_type}, {tqdm.format_sizeof(stored, 'B')})",
        "destination": f"{destination} ({type(part.config).model_type}, {tqdm.format_sizeof(size, 'B')})",
        "scheme": str(part.config.scheme),
        "patches": f"{len(layers)} attention layers, {len(norms)} norms",
        "adds": f"{len(added)} tensors, {count:,} parameters" + (f", first {added[0]}" if added else ""),
        "copies": ", ".join(copied) or "no other files",
        "leaves out": ", ".join(other_files(source.folder)) or "nothing",
    }
    return "\n".join(f"{title:12}{text}" for title, text in lines.items()), size


def _write(model: Any, source: Source, folder: Path, *, standalone: bool, shard: int) -> None:
    """Write the checkpoint: the model by its own method, the files beside the source's weights, and the card.

    An offloaded model is written in shards of at most `shard` bytes. A multimodal model keeps the source's card.
    """
    if standalone:
        add_standalone(model)
    options: dict[str, Any] = {"state_dict": state_with_mtp(model, source.folder)}
    if is_offloaded(model):  # transformers would save tied weights twice
        state = {name: x for name, x in options["state_dict"].items() if name not in model.all_tied_weights_keys}
        options = {"state_dict": state, "max_shard_size": shard}
    with warnings.catch_warnings(), quiet_transformers():
        warnings.filterwarnings("ignore", message="Attempting to save a model with offloaded modules")
        model.save_pretrained(folder, **options)
    copy_files(source, folder)
    if isinstance(model, QKNormModel):
        write_card(folder, base_model=hub_name(source.name))
    else:
        write_record(_patched_part(model), folder)
