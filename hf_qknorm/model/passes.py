"""The forward passes of a model that are watched, and the padding in their arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_qknorm.attend.watched import watch
from hf_qknorm.families.style import CACHE
from hf_qknorm.model.attention import QKNormAttention


class PassFilter:
    """The forward passes to watch, of all models or of the ones that `selects`, and the padding in their arguments.

    Models may call others: a pass starts and finishes with the outermost model. Gradient checkpointing recomputes
    layers in the backward pass, outside of any forward pass of a model.
    """

    def __init__(self, selects: Callable[[nn.Module], bool] | None = None) -> None:
        self.selects = selects
        self.watching = False
        self.masks: dict[nn.Module, Tensor | None] = {}  # of nested models

    def observe(self, model: nn.Module, observers: Mapping[str, Any]) -> list[Callable[[], Any]]:
        """Add observers to the layers of these names, and hook all transformers models.

        Returns the calls that undo this. Pickles and copies of the model hold them.
        """
        undo: list[Callable[[], Any]] = [partial(setattr, self, "watching", False)]  # others may still call these
        try:
            for module in model.modules():
                if isinstance(module, PreTrainedModel):
                    undo.append(module.register_forward_pre_hook(self.enter, with_kwargs=True).remove)
                    undo.append(module.register_forward_hook(self.leave, always_call=True).remove)
            for name, observer in observers.items():
                layer: Any = model.get_submodule(name)
                layer.observers += (observer,)
                undo += [partial(_remove_observer, layer, observer), watch(layer)]
        except BaseException:  # Ctrl-C too
            for each in undo:
                each()
            raise
        return undo

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module in self.masks:  # KeyboardInterrupt ended its last pass, without a call of `leave`
            self.masks.clear()
        if not self.masks:
            self.watching = self.selects is None or self.selects(module)
        if args and kwargs.get("attention_mask") is None:
            kwargs = kwargs | inspect.signature(type(module).forward).bind_partial(module, *args).arguments
        mask = kwargs.get("attention_mask", kwargs.get("pixel_attention_mask"))  # of an image's patches
        self.masks[module] = without_padding(mask, kwargs.get(CACHE))

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.masks.pop(module, None)
        if not self.masks:
            self.watching = False

    def real(self, rows: int | None, q: Tensor, k: Tensor, own: Any) -> Tensor | None:
        """Which queries q `[B, H, T, D]` of the first `rows` sequences are not padding, `[B, T]`; None for all.

        Tokens in front of the model's mask, such as those of an image, are none. A model that shortens its inputs, such
        as the samples of a sound, has a mask longer than its keys: then the layer's `own` mask counts.
        """
        mask, length = next(reversed(self.masks.values())) if self.masks else None, q.shape[2]
        if mask is not None and length == k.shape[2] < mask.shape[1]:
            mask = without_padding(own, None)
        if mask is None:
            return None
        front = max(length - mask.shape[1], 0)
        real = nn.functional.pad(mask[:rows, -length:].to(q.device).bool(), (front, 0), value=True)
        return None if bool(real.all()) else real


def without_padding(mask: Any, cache: Any) -> Tensor | None:
    """Which tokens are not padding, `[B, S]`, by a model's mask, or the masks of its kinds of layers; None for all.

    A mask of four dimensions, such as `generate` makes for a static cache, holds the keys that each query sees. A token
    that does not see its own key is padding.
    """
    if isinstance(mask, dict):
        mask = next((x for x in (mask.get("full_attention"), *mask.values()) if isinstance(x, Tensor)), None)
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
        return None
    mask = mask.detach()
    if mask.dim() == 2:
        return mask
    if mask.shape[2] == 1:  # one new token, which is none; or a mask of keys for all queries
        return None if cache is not None else sees(mask[:, 0, 0])
    queries, cached = torch.arange(mask.shape[2], device=mask.device), 0 if cache is None else cache.get_seq_length()
    if mask.dtype == torch.int32:  # ranges of keys, for the attention function "hf_qknorm"
        start, stop = mask[:, 0].unbind(-1)
        return (start <= queries + cached) & (queries + cached < stop)
    first = min(int(cached), mask.shape[3] - mask.shape[2])  # a window's cache drops keys
    return sees(mask[:, 0]).diagonal(first, 1, 2)


def sees(mask: Tensor) -> Tensor:
    """A mask, of bool or added to logits, as bool: whether a query sees a key."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min


def _remove_observer(layer: QKNormAttention, observer: Any) -> None:
    if left := tuple(other for other in vars(layer).pop("observers", ()) if other != observer):  # none once unpatched
        layer.observers = left
