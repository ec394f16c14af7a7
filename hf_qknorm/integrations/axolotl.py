"""axolotl's plugin: patches, calibrates and watches the model that axolotl builds, as its YAML file says.

    plugins:
      - hf_qknorm.integrations.axolotl.QKNormPlugin
    qk_norm_scheme: qk_norm_cap
    qk_norm_calibrate: corpus.txt

axolotl goes on without a plugin whose import raises ImportError. This module therefore imports little, and errors are
raised by the plugin's methods, which axolotl does not catch.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from transformers import PretrainedConfig

import hf_qknorm as qk
from hf_qknorm.families.class_names import TYPE_PREFIX
from hf_qknorm.files.names import CONFIG

if TYPE_CHECKING:
    from transformers import Trainer
    from transformers.trainer_callback import TrainerCallback

try:
    from axolotl.integrations.base import BasePlugin
except ImportError:  # without axolotl nothing calls the plugin
    BasePlugin = object

logger = logging.getLogger("axolotl.hf_qknorm")  # axolotl shows the messages of its own loggers

BASE: Final = "qk_norm_base"  # the folder, in the output folder, of the patched model that an adapter is trained on
LOG: Final = "qk_norm_logits.jsonl"  # of the monitor, in the output folder
FULL_ONLY: Final = ("qk_clip", "quack")  # keys that act on the weights of queries and keys


class QKNormPlugin(BasePlugin):
    """The plugin of axolotl that patches, calibrates and watches the model; `QKNormPluginArgs` has its keys.

    The base model is patched and calibrated when a training begins. A base model that is a patched checkpoint already
    is taken as it is. With an adapter the patched base is written to `qk_norm_base` in the output folder, where
    merging, inference and the continuation of a training find it.

    Raises ValueError, from axolotl's call, for keys that contradict each other or the rest of the file.
    """

    training = True  # rather than merging or inference, for which axolotl builds the model too

    def get_input_args(self) -> str:
        """Return the name of the class with the plugin's keys."""
        return "hf_qknorm.integrations.axolotl_args.QKNormPluginArgs"

    def register(self, cfg: Any) -> None:
        """Check the file's keys, before axolotl validates them, and set the base model of an adapter."""
        self.training = not (cfg.get("inference") or cfg.get("merge_lora"))
        _check_adapter(cfg)
        scheme, stored = _scheme(cfg), _stored_scheme(cfg["base_model"], cfg.get("revision_of_model"))
        if scheme is None and stored is None:
            return
        _leave_out_kernels(cfg)
        if stored is None and _is_named(cfg) and (not self.training or cfg.get("lora_model_dir")):
            cfg.setdefault("tokenizer_config", cfg.get("base_model_config") or cfg["base_model"])
            cfg["base_model"] = str(_written_base(cfg))
            cfg.pop("revision_of_model", None)
            stored = _stored_scheme(cfg["base_model"], None)
        if stored is not None:
            _check_same(cfg, *stored)
        elif self.training and scheme is not None:
            _check_patchable(cfg, scheme)

    def pre_model_load(self, cfg: Any) -> None:
        """Refuse an attention backend that would drop the cap, before the model is loaded."""
        from hf_qknorm.attend.functions import CAP_BACKENDS

        scheme, stored = _scheme(cfg), _stored_scheme(cfg.base_model, cfg.revision_of_model)
        cap = (stored[1] if stored else scheme or qk.Scheme()).softcap
        if cap is not None and cfg.attn_implementation not in (None, *CAP_BACKENDS):
            raise ValueError(
                f"attn_implementation: {cfg.attn_implementation} can't cap attention logits (softcap={cap:g}). Remove "
                "the key: attention then runs by hf_qknorm, which keeps packed sequences apart"
            )

    def post_model_build(self, cfg: Any, model: Any) -> None:
        """Patch and calibrate the base model, unless it is patched; with an adapter, let it train the gains."""
        from hf_qknorm.model.attention import patched_layers

        scheme = _scheme(cfg)
        if scheme is not None and self.training and not patched_layers(model):
            _check_whole(model)
            qk.patch_model(model, scheme, attn_implementation=cfg.attn_implementation if scheme.softcap else None)
            if _is_named(cfg):
                _calibrate(cfg, model)
        if not patched_layers(model):
            return
        if str(model.config._attn_implementation).startswith("hf_qknorm"):
            cfg.attn_decontaminates_packing = True  # by position_ids: axolotl then leaves out the mask
        if cfg.adapter:
            cfg.lora_modules_to_save = sorted({*(cfg.lora_modules_to_save or []), *qk.peft_modules_to_save(model)})

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[TrainerCallback]:
        """Return the schedules and QKClip that the file asks for."""
        callbacks: list[TrainerCallback] = []
        if cfg.qk_norm_knee_share is not None:
            callbacks.append(qk.KneeSchedule(cfg.qk_norm_knee_share))
        if _is_on(cfg.qk_clip):
            callbacks.append(qk.QKClip(model) if cfg.qk_clip is True else qk.QKClip(model, cfg.qk_clip))
        return callbacks

    def post_trainer_create(self, cfg: Any, trainer: Trainer) -> None:
        """Attach the monitor to the trainer, and let QuacK wrap its optimiser."""
        if _is_on(cfg.qk_norm_monitor):
            every = 10 if cfg.qk_norm_monitor is True else cfg.qk_norm_monitor
            qk.LogitMonitor(every=every, path=Path(cfg.output_dir) / LOG).attach(trainer)
        if _is_on(cfg.quack):  # here, because axolotl calls no plugin's `create_optimizer`
            qk.QuacK.attach(trainer, 1.0 if cfg.quack is True else cfg.quack)


def _is_on(value: Any) -> bool:
    return value is not None and value is not False


def _is_named(cfg: Any) -> bool:
    """Whether the file asks for a scheme other than "none"."""
    return cfg.get("qk_norm_scheme") is not None and qk.Scheme.of(cfg["qk_norm_scheme"]) != qk.SCHEMES["none"]


def _scheme(cfg: Any) -> qk.Scheme | None:
    """The scheme: "none", which changes nothing, for a file that only watches or clips logits."""
    name = cfg.get("qk_norm_scheme")
    if name is None and (_is_on(cfg.get("qk_norm_monitor")) or _is_on(cfg.get("qk_clip"))):
        name = "none"
    return None if name is None else qk.Scheme.of(name)


def _stored_scheme(base: str, revision: str | None) -> tuple[str, qk.Scheme] | None:
    """The unpatched model type and the scheme of a patched checkpoint; None for another one."""
    settings, _ = PretrainedConfig.get_config_dict(base, revision=revision)
    model_type = str(settings.get("model_type"))
    if not model_type.startswith(TYPE_PREFIX):
        return None
    return model_type.removeprefix(TYPE_PREFIX), qk.Scheme.stored(settings.get("qk_norm"))


def _written_base(cfg: Any) -> Path:
    """The patched base that a training wrote beside its adapter. Raises ValueError without one."""
    if not cfg.get("adapter"):
        raise ValueError(
            f"{cfg['base_model']} is not patched, and would get fresh gains: give the trained model, as "
            f"--base-model={cfg.get('output_dir')}"
        )
    folder = Path(cfg.get("lora_model_dir") or cfg["output_dir"])
    for parent in (folder, folder.parent):  # the adapter of a checkpoint lies a level deeper
        if (parent / BASE / CONFIG).is_file():
            return parent / BASE
    raise ValueError(
        f"the adapter in {folder} needs its patched base model, and there is no {folder / BASE}: give it as "
        f"base_model. An adapter that was trained on {cfg['base_model']} itself has no gains for a scheme"
    )


def _check_same(cfg: Any, model_type: str, stored: qk.Scheme) -> None:
    """Raise ValueError if the file asks for another scheme than its base model has; calibration may have changed it."""
    name = cfg.get("qk_norm_scheme")
    if name is None:
        return
    wanted = qk.Scheme.of(name).resolve()
    given, found = wanted, stored
    if given != found:
        raise ValueError(
            f"base_model {cfg['base_model']} is patched already, with another scheme ({stored}) than qk_norm_scheme "
            f"({wanted}): leave out qk_norm_scheme, or start from the unpatched model"
        )
    if cfg.get("qk_norm_calibrate"):
        logger.info("%s is patched already, and is not calibrated again", cfg["base_model"])


def _check_adapter(cfg: Any) -> None:
    for key in FULL_ONLY:
        if cfg.get("adapter") and _is_on(cfg.get(key)):
            raise ValueError(
                f"{key} acts on the weights of queries and keys, which are frozen with adapter: {cfg['adapter']}, and "
                f"not saved with it: leave out {key}, or the adapter"
            )


def _leave_out_kernels(cfg: Any) -> None:
    """Refuse the options that rewrite attention's forward, and leave out the ones that axolotl adds by itself."""
    for key in ("lora_qkv_kernel", "lora_o_kernel", "fused_attn_kernel"):
        if cfg.get(key):
            raise ValueError(f"{key} rewrites the forward of attention, without norms and cap: set {key}: false")
    if cfg.get("adapter"):
        cfg["lora_qkv_kernel"] = cfg["lora_o_kernel"] = False


def _check_patchable(cfg: Any, scheme: qk.Scheme) -> None:
    """Raise ValueError for keys with which an unpatched base model can't be patched or calibrated."""
    if not scheme.norms:
        return
    text = cfg.get("qk_norm_calibrate")
    if text is None or text is True:
        raise ValueError(
            "qk_norm_calibrate is not set: give a text for the new gains (a file, a folder or a Hub dataset), or false "
            "for fresh gains, with which a pretrained model loses part of what it knew"
        )
    if cfg.get("adapter") == "qlora" or cfg.get("load_in_4bit") or cfg.get("load_in_8bit"):
        raise ValueError(
            f"{cfg['base_model']} is quantised while it is loaded, before it can be calibrated. {_convert(cfg)}"
        )


def _convert(cfg: Any) -> str:
    name = cfg["qk_norm_scheme"]
    scheme = name if isinstance(name, str) else "SCHEME"
    text = cfg.get("qk_norm_calibrate") or "TEXT"
    return (
        f"Convert it first: hf-qknorm convert {cfg['base_model']} FOLDER --scheme {scheme} --data {text}, and "
        "set base_model: FOLDER"
    )


def _check_whole(model: Any) -> None:
    """Raise ValueError if this process holds only a part of the model."""
    if any(p.is_meta or hasattr(p, "ds_id") for p in model.parameters()):  # DeepSpeed sets ds_id
        raise ValueError(
            "this process holds a part of the model (ZeRO-3, or fsdp_config.cpu_ram_efficient_loading), which can't be "
            "patched: convert the checkpoint first (hf-qknorm convert), and give the result as base_model"
        )


def _calibrate(cfg: Any, model: Any) -> None:
    """Calibrate a patched model, and write it beside the adapter that will be trained on it."""
    from hf_qknorm.checkpoint import load_tokenizer
    from hf_qknorm.model.in_memory import unmark

    tokenizer = load_tokenizer(cfg.tokenizer_config)
    if cfg.qk_norm_calibrate:
        report = qk.calibrate(model, cfg.qk_norm_calibrate, knee=cfg.qk_norm_knee, tokenizer=tokenizer)
        logger.info("%s", report)
    if cfg.adapter:
        folder = Path(cfg.output_dir) / BASE
        if not cfg.local_rank:
            _save(model, tokenizer, folder)
        unmark(model)
        model.name_or_path = model.config._name_or_path = str(folder)  # which PEFT records in the adapter


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    from hf_qknorm.files.atomic_io import new_folder
    from hf_qknorm.files.destinations import check_folder

    with new_folder(folder, lambda: check_folder(folder, overwrite=True)) as new:
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)
    logger.info("wrote the patched base model of the adapter to %s", folder)
