"""Multi-token prediction, `generate(use_mtp=True)`, with patched models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn


def build_layers(init: Callable[..., None], mtp: Any, /, main_model: Any, *args: Any, **kwargs: Any) -> None:
    """Build the layers by transformers' constructor, with the norms of the unpatched model, and without a scheme.

    It takes the class of the first norm in the model's last layer, and is shown that layer without its attention, which
    may hold a scheme's norms, and without what takes the place of folded ones.
    """
    from hf_qknorm.model.attention import QKNormAttention

    decoder, shown = copy.copy(main_model.get_decoder()), copy.copy(main_model)
    last = copy.copy(decoder.layers[-1])
    left = {name: x for name, x in last._modules.items() if not isinstance(x, QKNormAttention | nn.Identity)}
    last._modules, decoder._modules = left, decoder._modules | {"layers": [last]}
    shown.get_decoder = lambda: decoder
    init(mtp, shown, *args, **kwargs)
