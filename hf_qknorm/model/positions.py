"""Positions of new tokens behind a cache, for models that do not count the cached tokens themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_qknorm.families.style import CACHE

if TYPE_CHECKING:  # the mixin precedes a model's own class
    from transformers import PreTrainedModel as _Model
else:
    _Model = object


class CountsCached(_Model):
    """A mixin for a model class that, without `position_ids`, numbers the tokens of each call from 0."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the model's own forward, with positions that continue those in the cache if none are given."""
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        cache = kwargs.pop(CACHE, past_key_values)
        if position_ids is None and cache is not None and tokens is not None:
            new = torch.arange(tokens.shape[1], device=tokens.device)
            position_ids = (new + cache.get_seq_length())[None]
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **{CACHE: cache},
            **kwargs,
        )
