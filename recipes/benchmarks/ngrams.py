"""Tables of characters that follow one another: the losses that a trained model has to beat.

A model that attends to nothing, and predicts from the present character alone, can do no better than about the bigram
table. One that ends under the trigram's loss has used attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMOOTHING = 0.1  # added to every count


def ngram_loss(seen: Tensor, held_out: Tensor, vocabulary: int, order: int) -> float:
    """Return the loss on `held_out` `[M]` of the table of `order` characters counted in `seen` `[N]`, in nats.

    The probability of a character after the `order` − 1 before it is (count + 0.1) / (count of these + 0.1·vocabulary),
    without interpolation or back-off.
    """
    counts = torch.bincount(_codes(seen, vocabulary, order), minlength=vocabulary**order).double() + SMOOTHING
    table = counts.view(-1, vocabulary)
    table /= table.sum(-1, keepdim=True)
    return -float(table.view(-1)[_codes(held_out, vocabulary, order)].log().mean())


def _codes(ids: Tensor, vocabulary: int, order: int) -> Tensor:
    """The number of each run of `order` characters, `[N − order + 1]`."""
    windows = ids.unfold(0, order, 1)
    return windows @ vocabulary ** torch.arange(order - 1, -1, -1)
