"""The attention modules of a model, patched or not, that are observed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from transformers import PreTrainedModel

from hf_qknorm.families import REFUSED, family_of
from hf_qknorm.model.attention import QKNormAttention, patched_layers
from hf_qknorm.model.install import install, own_layers, uninstall
from hf_qknorm.patch import require_own_forward
from hf_qknorm.scheme import SCHEMES


@contextmanager
def watchable_layers(model: Any) -> Iterator[dict[str, QKNormAttention]]:
    """The attention modules of `model` by name; in an unpatched model they have the scheme "none" inside the block.

    "none" changes no number. Unlike `patch_model` this leaves the model's class and config alone, and reaches into
    wrappers such as DDP's and PEFT's. After the block the modules are as before.

    Raises ValueError for a model without an attention module of a known family, or with one whose forward another tool
    has replaced.
    """
    with ExitStack() as stack:
        for module in () if patched_layers(model) else list(model.modules()):
            if isinstance(module, PreTrainedModel) and module.config.model_type not in REFUSED:
                family = family_of(module.config)
                if own_layers(module, family):
                    require_own_forward(module, family)
                    stack.callback(uninstall, module)
                    install(module, family, SCHEMES["none"])
        layers = patched_layers(model)
        if not layers:
            raise ValueError(
                f"{type(model).__name__} has no attention module of a known family, whose logits could be watched: "
                "see hf-qknorm families"
            )
        yield layers
