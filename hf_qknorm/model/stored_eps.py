"""The ε of norms with a knee, which weights hold beside their gains: how it is loaded by `from_pretrained`."""

from __future__ import annotations

from typing import Any, Final

from transformers import PreTrainedModel

from hf_qknorm.model.attention import head_norms, patched_layers
from hf_qknorm.model.config_checks import config_file
from hf_qknorm.model.load_checks import are_skipped, check_loaded

ROUNDING: Final = 0.01  # of a cast to 16 bits by another tool


def expect_eps(model: PreTrainedModel, has_eps: bool) -> None:
    """Let transformers load the ε in the weights, if they hold any; see `take_eps`.

    Raises ValueError for a knee with neither ε in the weights nor powers in the config.
    """
    for name, layer in patched_layers(model).items():
        config: Any = layer.config
        norms = [norm for norm in head_norms(layer).values() if norm.knee]
        if norms and not has_eps and config.qk_norm_powers is None and not are_skipped():
            raise ValueError(
                f"{config_file(config)} has a knee of {layer.scheme.knee:g} and no qk_norm_powers, the means that it "
                f"multiplies; nor do the weights hold eps for {name}. Restore the config.json that was saved with the "
                "weights"
            )
        for norm in norms:
            norm.expect_eps()


def take_eps(model: PreTrainedModel, missing: set[str]) -> None:
    """Compare the loaded ε of each norm with the config's, or take it if the config has no powers (versions 0.1, 0.2).

    `missing` are the tensors that the weights lack; an ε that the config makes up for is removed from it. Raises
    ValueError for an ε that contradicts the config, and for one that neither the config nor this process has.
    """
    for name, layer in patched_layers(model).items():
        config: Any = layer.config
        for norm_name, norm in head_norms(layer).items():
            if "eps" not in norm._buffers:
                continue
            key, in_config = f"{name}.{norm_name}.eps", config.qk_norm_powers is not None
            stored: Any = norm._buffers["eps"]
            absent = key in missing or stored.is_meta or not stored
            if in_config:
                missing.discard(key)
            if are_skipped():  # the caller compares it with the weights
                continue
            del norm._buffers["eps"]
            check_loaded(model, missing & {key}, ())
            if absent and not in_config:
                raise ValueError(
                    f"{key} of version 0.2 or older is not in this process's memory: load the checkpoint once as a "
                    "whole, without offloading and FSDP, and save it with save_pretrained"
                )
            if not in_config:
                norm.take_eps(stored)
            elif not absent and abs(float(stored) / float(norm.eps) - 1) > ROUNDING:
                raise ValueError(
                    f"{key} is {float(stored):g} in the weights, and {float(norm.eps):g} by the knee and the "
                    f"qk_norm_powers of {config_file(config)}. Restore the config.json that was saved with the weights"
                )
