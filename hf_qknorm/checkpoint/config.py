"""A checkpoint's config.json: read without running its code, and the model class that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from hf_qknorm.families.class_names import PREFIX, TYPE_PREFIX
from hf_qknorm.files.formatting import shorten
from hf_qknorm.files.names import CONFIG
from hf_qknorm.files.untrusted import read_json
from hf_qknorm.model.config_checks import check_settings, describe_error
from hf_qknorm.model.derived import derived_model


def read_config(folder: Path) -> Any:
    """Read the config of the checkpoint in a folder; none of its code is run.

    Raises FileNotFoundError without a config.json, ValueError, naming it, for one that can't be read.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: is this a checkpoint of transformers?")
    data = read_json(path)
    if not isinstance(data, dict):
        raise ValueError(f"{path} is {shorten(data)}, expected a mapping: download it again")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        check_settings(config)
        return config
    except Exception as error:  # transformers raises various types for a wrong field
        if isinstance(error, OSError) or (isinstance(error, ValueError) and CONFIG in str(error)):
            raise
        raise ValueError(f"{path} can't be read ({describe_error(error)})") from error


def model_class_of(config: Any, folder: Path) -> Any:
    """Return the class that a config names: one of transformers, or for a patched checkpoint its derived class.

    Raises ValueError, naming config.json, for a class that transformers does not have.
    """
    architectures: list[str] = config.architectures or []  # `read_config` has checked the type
    patched = config.model_type.startswith(TYPE_PREFIX)
    found: Any = getattr(transformers, "".join(architectures[:1]).removeprefix(PREFIX), None)
    is_model = isinstance(found, type) and issubclass(found, PreTrainedModel)
    if is_model and found.config_class is not None:
        return derived_model(found) if patched else found
    example = f"{PREFIX if patched else ''}LlamaForCausalLM"
    raise ValueError(
        f'{folder / CONFIG}: "architectures" is {shorten(architectures or "missing")}, expected the name of a class of '
        f'transformers for model_type {shorten(config.model_type)}, as ["{example}"] for a Llama'
    )


def check_readable(written: Path, source: Path) -> None:
    """Raise ValueError, naming the file of `source` at fault, unless transformers reads the settings in `written`."""
    for name, read in ((CONFIG, read_config), ("generation_config.json", GenerationConfig.from_pretrained)):
        if not (written / name).is_file():
            continue
        try:
            read(written)
        except Exception as error:  # transformers raises various types for a wrong setting
            cause = describe_error(error).replace(str(written), "the result")
            raise ValueError(f"{source / name}: a checkpoint with these settings does not load ({cause})") from error
