"""What the code that travels with a checkpoint has in place of the package's own definitions.

There is nothing but PyTorch and transformers then: attention is plain, and its own file is what is saved again.
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

from hf_qknorm.backends.functions import eager_attention

DERIVED: Final = "hf_qknorm.model.derived"
OWN_BACKENDS: Final = ("hf_qknorm", "hf_qknorm_eager")  # the one that checkpoints ask for; both are plain here
CAP_BACKENDS: Final = (
    *OWN_BACKENDS,
    "eager",
    "flex_attention",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
)


def installed(config: str) -> ModuleType | None:
    """The package's own derived classes, where it is installed and has the class `config`: they win.

    None for a folder that only shares the package's name, as a clone in the working directory does, and for a version
    that has no such model. An installed package that is broken raises its own ImportError.
    """
    try:
        package = import_module(DERIVED)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{DERIVED}.".startswith(f"{error.name}."):  # a part that it needs is missing
            raise
        return None
    if not hasattr(package, config):
        logging.getLogger("hf_qknorm").warning(
            "the installed hf_qknorm has no %s: the code beside the checkpoint runs it, without kernels", config
        )
        return None
    return package


def register() -> None:
    """Register plain attention together with its mask function: without one, causality is lost."""
    for name in OWN_BACKENDS:
        AttentionInterface.register(name, eager_attention)
        AttentionMaskInterface.register(name, eager_mask)


def set_module_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Swap the class of a module that is being built: no hook of accelerate is on it yet."""
    module.__class__ = cls


def execution_device(*modules: nn.Module) -> None:
    """Where accelerate's hooks run a module that is being built: there are none yet."""


def set_auto_map(config: Any) -> None:
    """Name this file's classes in a config that came with it, without the Hub's name that loading put before them."""
    config.auto_map = {auto: name.rpartition("--")[2] for auto, name in (config.auto_map or {}).items()}


def write_standalone_code(config: Any, folder: Path) -> None:
    """Put this file, which runs the model, into `folder`, and name its classes in the config."""
    set_auto_map(config)
    own = Path(__file__)
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as temporary:  # a killed run leaves the old file or the new one
        copy = Path(shutil.copy(own, temporary))
        copy.replace(folder / own.name)
