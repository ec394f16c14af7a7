"""Generate the stand-alone file of a patched model type, and put it beside a checkpoint.

The file `modeling_qknorm.py` runs the checkpoint with torch and transformers alone. README.md tells how it is made.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from hf_qknorm.families import FAMILIES, known_types
from hf_qknorm.families.class_names import PREFIX, TYPE_PREFIX, classes_of
from hf_qknorm.files.atomic_io import replace_text
from hf_qknorm.files.formatting import shorten
from hf_qknorm.files.names import CODE_FILE
from hf_qknorm.files.paths import user_path
from hf_qknorm.scheme import Scheme
from hf_qknorm.standalone.bundler import Bundle
from hf_qknorm.standalone.notice import NOTICES

_FAMILIES = ("hf_qknorm.families", "FAMILIES")
_RUNTIME = "hf_qknorm.standalone.runtime"
_ROOTS = (
    ("hf_qknorm.model.derived", "derived_config"),
    ("hf_qknorm.model.derived", "derived_model"),
    (_RUNTIME, "installed_package"),
    (_RUNTIME, "register"),
)
_REPLACED = {
    (module, name): (_RUNTIME, "no_kernel" if module == "hf_qknorm.model.raw_heads" else name)
    for module, names in (
        ("hf_qknorm.model.raw_heads", ("fused_attention", "norm_rotate", "normed")),
        ("hf_qknorm.attend.functions", ("CAP_BACKENDS", "OWN_BACKENDS")),
        ("hf_qknorm.model.accelerate_hooks", ("execution_device", "set_module_class")),
        ("hf_qknorm.model.record", ("load_record", "write_record")),
        ("hf_qknorm.standalone.generate", ("set_auto_map", "write_standalone_code")),
    )
    for name in names
}
_HEAD = '''"""{config} and its models: a {base} whose attention is normalised, capped, or both.

This file runs the checkpoint beside it with torch and transformers alone:

    AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True)

hf_qknorm generates it from its own sources, without the fused kernels. If hf_qknorm is installed, its own classes are
used instead: they load the same checkpoints, and run the kernels. Apache-2.0.
"""

'''
_FOOT = """

package = installed_package("{config}")
if package is None:
    register()
{own}
else:
{theirs}
"""


def auto_map(model_type: str, architectures: Iterable[str] | None = None) -> dict[str, str]:
    """Return the class of the stand-alone file for each Auto class that loads a patched `model_type`.

    If the Auto class has several, as for DeiT's two classifiers, it is the one in `architectures`, or else the first.
    """
    classes, own = {"AutoConfig": CONFIG_MAPPING_NAMES[model_type]}, [*(architectures or ())]
    for auto, names in classes_of(model_type).items():
        classes[auto] = next((name for name in names if f"{PREFIX}{name}" in own), names[0])
    return {auto: f"{Path(CODE_FILE).stem}.{PREFIX}{name}" for auto, name in classes.items()}


@cache
def standalone_code(model_type: str) -> str:
    """Return the text of the stand-alone file for a patched `model_type`."""
    config = f"{PREFIX}{CONFIG_MAPPING_NAMES[model_type]}"
    models = [f"{PREFIX}{name}" for name in dict.fromkeys(chain(*classes_of(model_type).values()))]
    bases = {name: getattr(transformers, name.removeprefix(PREFIX)) for name in models}
    types = {name: base.config_class.model_type for name, base in bases.items()}
    bundle = Bundle(_ROOTS, _REPLACED, {_FAMILIES: tuple(sorted({model_type, *types.values()} & FAMILIES.keys()))})
    own = [f'{config} = derived_config("{model_type}")']
    for name, base in bases.items():
        own.append(f"{name} = derived_model(transformers.{base.__name__})")
        if types[name] != model_type:  # this model type uses another type's model classes
            own.append(f"{name}.config_class = {config}")
    if reference := auto_map(model_type).get("AutoModel"):
        own.append("# Heads such as LlamaForSequenceClassification make their base model by AutoModel.from_config.")
        own.append(f"transformers.AutoModel.register({config}, {reference.rpartition('.')[2]}, exist_ok=True)")
    foot = _FOOT.format(
        config=config,
        own="\n".join(f"    {line}" for line in own),
        theirs="\n".join(f"    {name} = package.{name}" for name in (config, *models)),
    )
    return _HEAD.format(config=config, base=model_type) + bundle.text() + foot


def check_standalone(model_type: str, scheme: Scheme) -> None:
    """Raise ValueError for a model type or a scheme with parts that are not in the package's own sources."""
    try:
        code = standalone_code(model_type)
    except (AttributeError, LookupError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    else:
        foreign = [norm for norm in scheme.norms if f'"{norm}": NormKind(' not in code]
        if not foreign:
            return
        problem = f"the norm {foreign[0]!r} is not hf_qknorm's own"
    raise ValueError(
        f"no stand-alone code can be made for {model_type} with this scheme ({problem}): convert without it, by "
        "standalone=False (--no-standalone)"
    )


def set_auto_map(config: Any) -> None:
    """Name the stand-alone classes in a derived `config`. Every later save of it then includes their file."""
    config.auto_map = auto_map(config.base_model_type, config.architectures)


def write_standalone_code(config: Any, folder: Path) -> None:
    """Write the stand-alone file for a derived `config` into `folder`, and name its classes in the config."""
    set_auto_map(config)
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / CODE_FILE, standalone_code(config.base_model_type))


def add_standalone(checkpoint: PreTrainedModel | str | os.PathLike[str]) -> None:
    """Add the code that runs a patched checkpoint with torch and transformers alone, for `trust_remote_code=True`.

    A folder gets the file `modeling_qknorm.py`, and the `auto_map` in its config.json that names the file's classes.
    A model in memory is marked: every later `save_pretrained` or `push_to_hub` includes both.

    Raises ValueError if the checkpoint is not patched or its scheme changes nothing, TypeError for a wrapped model, and
    FileNotFoundError for a folder without a config.json.

    >>> from hf_qknorm.standalone.generate import add_standalone
    >>> qk.patch_model(model, scheme="qk_norm_cap").save_pretrained("out")
    >>> add_standalone("out")
    >>> import json
    >>> json.load(open("out/config.json"))["auto_map"]["AutoModelForCausalLM"]
    'modeling_qknorm.QKNormLlamaForCausalLM'
    """
    if isinstance(checkpoint, PreTrainedModel):
        _base_type(type(checkpoint.config).model_type, type(checkpoint).__name__)
        set_auto_map(checkpoint.config)
        return
    if isinstance(checkpoint, nn.Module):
        raise TypeError(
            f"got a {type(checkpoint).__name__}, expected a transformers PreTrainedModel or a folder: give the model "
            "inside the wrapper, get_base_model() of a PEFT model"
        )
    folder = user_path(checkpoint, "checkpoint")
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: expected the folder of a patched checkpoint")
    config = json.loads(path.read_text(encoding="utf-8"))
    model_type = _base_type(config.get("model_type") if isinstance(config, dict) else None, str(path))
    code = standalone_code(model_type)
    config |= {"auto_map": auto_map(model_type, config.get("architectures")), **NOTICES}
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    replace_text(folder / CODE_FILE, code)
    replace_text(path, text)


def _base_type(model_type: Any, where: str) -> str:
    base = model_type.removeprefix(TYPE_PREFIX) if isinstance(model_type, str) else None
    if base == model_type or base not in known_types():
        raise ValueError(
            f"{where}: model_type is {shorten(model_type)}, expected a patched model's, such as {TYPE_PREFIX}llama: "
            "patch the model with patch_model, or convert it with convert_checkpoint, first"
        )
    return base
