"""The code that travels with a checkpoint: one file that runs it with torch and transformers alone.

It is made of the package's own definitions, those that the plain path of the checkpoint's family needs.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from hf_qknorm.families import FAMILIES
from hf_qknorm.families.class_names import AUTO_CLASSES, PREFIX, TYPE_PREFIX
from hf_qknorm.files.atomic_io import replace_text
from hf_qknorm.files.names import CODE_FILE
from hf_qknorm.files.paths import user_path
from hf_qknorm.standalone.bundler import Bundle
from hf_qknorm.standalone.notice import NOTICES

_FAMILIES = ("hf_qknorm.families", "FAMILIES")
_ROOTS = (
    ("hf_qknorm.model.derived", "derived_config"),
    ("hf_qknorm.model.derived", "derived_model"),
    ("hf_qknorm.standalone.runtime", "installed"),
    ("hf_qknorm.standalone.runtime", "register"),
)
_REPLACED = {
    ("hf_qknorm.model.attention", "QKNormAttention"): ("hf_qknorm.model.plain_attention", "PlainAttention"),
    ("hf_qknorm.backends.functions", "CAP_BACKENDS"): ("hf_qknorm.standalone.runtime", "CAP_BACKENDS"),
    ("hf_qknorm.model.hooks", "execution_device"): ("hf_qknorm.standalone.runtime", "execution_device"),
    ("hf_qknorm.model.hooks", "set_class"): ("hf_qknorm.standalone.runtime", "set_module_class"),
    ("hf_qknorm.standalone", "carry_code"): ("hf_qknorm.standalone.runtime", "carry_code"),
    ("hf_qknorm.standalone", "write_code"): ("hf_qknorm.standalone.runtime", "write_code"),
}
_HEAD = '''"""{config} and its models: a {base} whose attention is normalised, capped, or both.

This file runs the checkpoint beside it with torch and transformers alone:

    AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True)

It is made by hf_qknorm from its own sources, and is the plain path of that package. Where hf_qknorm is installed, its
classes take the place of these: they load the same checkpoints, and have faster kernels. Apache-2.0.
"""

'''
_FOOT = """

package = installed("{config}")
if package is None:
    register()
{own}
else:
{theirs}
"""


def auto_map(model_type: str) -> dict[str, str]:
    """For each Auto class, the class of the stand-alone file that a patched `model_type` is loaded by.

    Of several, as of DeiT's two classifiers, it is the first, which can be trained.
    """
    classes = {"AutoConfig": CONFIG_MAPPING_NAMES[model_type]}
    for auto, names in AUTO_CLASSES.items():
        if model_type in names:
            name = names[model_type]
            classes[auto] = name if isinstance(name, str) else name[0]
    return {auto: f"{Path(CODE_FILE).stem}.{PREFIX}{name}" for auto, name in classes.items()}


@cache
def standalone_code(model_type: str) -> str:
    """The stand-alone file for a patched `model_type`."""
    config, *models = dict.fromkeys(name.rpartition(".")[2] for name in auto_map(model_type).values())
    bases = {name: getattr(transformers, name.removeprefix(PREFIX)) for name in models}
    types = {name: base.config_class.model_type for name, base in bases.items()}
    bundle = Bundle(_ROOTS, _REPLACED, {_FAMILIES: tuple(sorted({model_type, *types.values()}))})
    own = [f'{config} = derived_config("{model_type}")']
    for name, base in bases.items():
        own.append(f"{name} = derived_model(transformers.{base.__name__})")
        if types[name] != model_type:  # a type without models of its own
            own.append(f"{name}.config_class = {config}")
    foot = _FOOT.format(
        config=config,
        own="\n".join(f"    {line}" for line in own),
        theirs="\n".join(f"    {name} = package.{name}" for name in (config, *models)),
    )
    return _HEAD.format(config=config, base=model_type) + bundle.text() + foot


def carry_code(config: Any) -> None:
    """Name the stand-alone classes in a derived `config`, which then gives their file to whatever it is saved to."""
    config.auto_map = auto_map(config.base_model_type)


def write_code(config: Any, folder: Path) -> None:
    """Put the stand-alone file for a derived `config` into `folder`, and name its classes in the config."""
    carry_code(config)
    folder.mkdir(parents=True, exist_ok=True)
    code = standalone_code(config.base_model_type)
    replace_text(folder / CODE_FILE, code)


def add_standalone(checkpoint: PreTrainedModel | str | os.PathLike[str]) -> None:
    """Let a patched checkpoint carry the code that runs it with torch and transformers alone.

    A folder gets the file `modeling_qknorm.py` and, in its config.json, the `auto_map` that
    `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)` goes by. A model in memory is marked, and
    gives them to whatever folder or repository it is saved to from then on.

    Raises ValueError for what is not patched, FileNotFoundError for a folder without a config.json.
    """
    if isinstance(checkpoint, PreTrainedModel):
        _base_type(checkpoint.config.model_type, type(checkpoint).__name__)
        carry_code(checkpoint.config)
        return
    folder = user_path(checkpoint, "checkpoint")
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: expected the folder of a patched checkpoint")
    config = json.loads(path.read_text(encoding="utf-8"))
    model_type = _base_type(config.get("model_type") if isinstance(config, dict) else None, str(path))
    code = standalone_code(model_type)
    config |= {"auto_map": auto_map(model_type), **NOTICES}
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    replace_text(folder / CODE_FILE, code)
    replace_text(path, text)


def _base_type(model_type: Any, where: str) -> str:
    base = model_type.removeprefix(TYPE_PREFIX) if isinstance(model_type, str) else None
    if base == model_type or base not in FAMILIES:
        raise ValueError(
            f"{where}: model_type is {model_type!r}, expected that of a patched model, as {TYPE_PREFIX}llama: patch it "
            "with patch_model, or convert it with convert_checkpoint, first"
        )
    return base
