"""The ε of norms with a knee, which weights hold beside their gains: how it is loaded by `from_pretrained`."""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers import PreTrainedModel

from hf_qknorm.model.attention import head_norms, patched_layers
from hf_qknorm.model.config_checks import config_file
from hf_qknorm.model.load_checks import are_skipped, check_loaded

ROUNDING: Final = 0.01  # of a cast to 16 bits by another tool


def expect_eps(model: PreTrainedModel, has_eps: bool) -> None:
    """Give norms with a knee a buffer for the ε in the weights, if they hold any; see `take_eps`.

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
        device = next(layer.parameters()).device
        for norm in norms if has_eps else ():
            vars(norm)["eps_of_config"] = vars(norm).pop("eps")
            norm.register_buffer("eps", torch.empty((), dtype=torch.float32, device=device))


def take_eps(model: PreTrainedModel, missing: set[str]) -> None:
    """Remove the buffers of `expect_eps`. Powers that the config lacks, as of versions 0.1 and 0.2, come from them.

    `missing` are the tensors that the weights lack; those of the buffers are removed from it. Raises ValueError for an
    ε that contradicts the config, and for one that neither the config nor this process has.
    """
    for name, layer in patched_layers(model).items():
        config: Any = layer.config
        for norm_name, norm in head_norms(layer).items():
            if "eps" not in norm._buffers or are_skipped():
                continue
            stored: Any = norm._buffers.pop("eps")
            norm.eps = vars(norm).pop("eps_of_config")
            key, in_config = f"{name}.{norm_name}.eps", config.qk_norm_powers is not None
            absent = stored.is_meta or not stored or key in missing
            if not in_config and key in missing:
                check_loaded(model, {key}, ())
            elif not in_config and absent:
                raise ValueError(
                    f"{key} of version 0.2 or older is not in this process's memory: load the checkpoint once as a "
                    "whole, without offloading and FSDP, and save it with save_pretrained"
                )
            missing.discard(key)
            if absent:
                continue
            if not in_config:
                norm.take_eps(stored)
            elif abs(float(stored) / float(norm.eps) - 1) > ROUNDING:
                raise ValueError(
                    f"{key} is {float(stored):g} in the weights, and {float(norm.eps):g} by the knee and the "
                    f"qk_norm_powers of {config_file(config)}. Restore the config.json that was saved with the weights"
                )
