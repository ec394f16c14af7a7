"""The tasks of `long_context.py`: held-out text in rows, repeated spans, and a model that is taught to copy them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KINDS = ("random", "shuffled", "natural")
LEAD = 4  # characters of the second copy that only show where the first one is
NEAREST, PERIODS = 16, (4, 24)  # the shortest repeated span in a row, and the periods of the first stage


@dataclass(frozen=True)
class Stage:
    """A stage of training: steps of `rows` rows of `length` tokens."""

    steps: int
    rows: int
    length: int
    rate: float = 1e-3
    warmup: int = 20


class Draw:
    """Rows of tokens from a text `ids` `[N]`, reproducible by `seed`."""

    def __init__(self, ids: Tensor, seed: int) -> None:
        self.ids, self.alphabet = ids, ids.unique()
        self.generator = torch.Generator().manual_seed(seed)

    def below(self, low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=self.generator))

    def text(self, length: int) -> Tensor:
        start = self.below(0, len(self.ids) - length)
        return self.ids[start : start + length].clone()

    def random(self, length: int) -> Tensor:
        """Characters of the text's alphabet, independent and equally likely."""
        return self.alphabet[torch.randint(len(self.alphabet), (length,), generator=self.generator)]

    def periodic(self, length: int, least: int, most: int) -> Tensor:
        """A random span, repeated to the end of the row."""
        span = self.random(self.below(least, most + 1))
        return span.repeat(length // len(span) + 1)[:length]

    def repeated(self, length: int) -> Tensor:
        """Text in which a random span stands at two random places."""
        row, size = self.text(length), self.below(NEAREST, length // 4 + 1)
        first = self.below(0, length - 2 * size + 1)
        second = self.below(first + size, length - size + 1)
        row[first : first + size] = row[second : second + size] = self.random(size)
        return row

    def copies(self, kind: str, distance: int, span: int, rows: int) -> Tensor:
        """Rows `[rows, distance + span]` of text that begin with a span, and end with its copy."""
        return torch.stack([self._copied(kind, distance, span) for _ in range(rows)])

    def _copied(self, kind: str, distance: int, span: int) -> Tensor:
        row = self.text(distance + span)
        if kind == "random":
            row[:span] = self.random(span)
        elif kind == "shuffled":
            row[:span] = row[:span][torch.randperm(span, generator=self.generator)]
        row[distance:] = row[:span].clone()
        return row


def short_rows(draw: Draw, stage: Stage) -> Tensor:
    """The first stage of teaching: random spans with short periods."""
    return torch.stack([draw.periodic(stage.length, *PERIODS) for _ in range(stage.rows)])


def mixed_rows(draw: Draw, stage: Stage) -> Tensor:
    """The second stage of teaching, and further training: every other row of text holds a repeated span."""
    rows = [draw.repeated(stage.length) if i % 2 == 0 else draw.text(stage.length) for i in range(stage.rows)]
    return torch.stack(rows)


def train(model: Any, draw: Draw, stage: Stage, rows: Callable[[Draw, Stage], Tensor]) -> Iterator[float]:
    """Train in bf16 autocast, without dropout, at a constant rate after the warm-up; yield the loss of each step."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=stage.rate, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(stage.steps):
        for group in optimizer.param_groups:
            group["lr"] = stage.rate * min((step + 1) / stage.warmup, 1.0)
        batch = rows(draw, stage)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield float(loss.detach())
    model.eval()


@torch.no_grad()
def token_losses(model: Any, batch: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each token but the first, in nats, and whether the model thinks it the most likely: `[B, T − 1]`."""
    logits, targets = model(batch, use_cache=False).logits[:, :-1].float(), batch[:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    return losses, logits.argmax(-1) == targets


def losses_by_position(model: Any, rows: Tensor, edges: list[int]) -> list[list[float]]:
    """The mean loss of each row `[T]` in each stretch of positions between neighbouring edges."""
    losses = torch.cat([token_losses(model, batch)[0] for batch in rows.split(4)])
    # the token at position i is predicted from i tokens before it, by entry i − 1
    cut = [losses[:, max(low - 1, 0) : high - 1].mean(1) for low, high in zip(edges, edges[1:], strict=False)]
    return [[round(value, 4) for value in row] for row in torch.stack(cut, 1).tolist()]


def copying(model: Any, draw: Draw, kind: str, distance: int, span: int, tokens: int) -> dict[str, list[float]]:
    """By row: the losses of the first copy and of the second, and the share of characters that are predicted right.

    The first `LEAD` characters of each copy do not count: they show the model where the first copy is.
    """
    rows = min(max(tokens // (distance + span), 8), 32)
    losses, right = (torch.cat(parts) for parts in zip(*(token_losses(model, batch) for batch in
                     draw.copies(kind, distance, span, rows).split(4)), strict=True))  # fmt: skip
    first, second = slice(LEAD - 1, span - 1), slice(distance + LEAD - 1, None)
    found = {"first": losses[:, first], "second": losses[:, second]}
    found |= {"right_first": right[:, first].float(), "right": right[:, second].float()}
    return {name: [round(value, 4) for value in values.mean(1).tolist()] for name, values in found.items()}
