"""Substitutes for parts of the package in the generated stand-alone file.

The file has PyTorch and transformers alone: attention is eager, and a saved checkpoint gets a copy of the file.
"""

from __future__ import annotations

import logging
import shutil
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, Final

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from hf_qknorm.attend.functions import eager_attention

DERIVED: Final = "hf_qknorm.model.derived"
OWN_BACKENDS: Final = ("hf_qknorm", "hf_qknorm_eager")  # checkpoints ask for the first; both are eager here
CAP_BACKENDS: Final = (*OWN_BACKENDS, "eager", "flex_attention", *(f"flash_attention_{n}" for n in (2, 3, 4)))


def installed_package(config: str) -> ModuleType | None:
    """Return the module of hf_qknorm's derived classes, if hf_qknorm is installed and has the class `config`.

    Returns None for a folder that only shares the package's name, such as a clone in the working directory, and for a
    version without this model. A broken installation raises its own ImportError.
    """
    try:
        package = import_module(DERIVED)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{DERIVED}.".startswith(f"{error.name}."):  # a dependency is missing
            raise
        return None
    if not hasattr(package, config):
        logging.getLogger("hf_qknorm").warning(
            "the installed hf_qknorm has no %s: the code beside the checkpoint is used, without kernels", config
        )
        return None
    return package


def register() -> None:
    """Register plain attention together with its mask function: without one, causality is lost."""
    for name in OWN_BACKENDS:
        AttentionInterface.register(name, eager_attention)
        AttentionMaskInterface.register(name, eager_mask)


def no_kernel(*arguments: Any) -> None:
    """Return None for each kernel that norms and rotates heads: modules and the model's own RoPE do."""


def set_module_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Set the class of a module under construction, which has no accelerate hook yet."""
    module.__class__ = cls


def execution_device(*modules: nn.Module) -> None:
    """Return no device: a module under construction has no accelerate hook yet."""


def load_record(model: Any, name: Any, options: Any) -> None:
    """Leave the report of a calibration in its folder: only the package measures, and reads reports."""


def write_record(model: Any, folder: Path) -> None:
    """Write no report: only the package measures."""


def set_auto_map(config: Any) -> None:
    """Name this file's classes in a config, without the repository name that loading from the Hub puts before them."""
    config.auto_map = {auto: name.rpartition("--")[2] for auto, name in (config.auto_map or {}).items()}


def write_standalone_code(config: Any, folder: Path) -> None:
    """Copy this file into `folder`, and name its classes in the config."""
    set_auto_map(config)
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as temporary:  # a killed run leaves the old file or the new one
        copy = Path(shutil.copy(__file__, temporary))
        copy.replace(folder / copy.name)
