"""The results of the demo: as text for a terminal, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hf_qknorm.files.formatting import format_fixed
from hf_qknorm.training.logit_log import nan_as_inf

WIDTH = 118  # characters of a line with a text
LEVEL = 5e-4  # nats; smaller differences round to zero


@dataclass(frozen=True)
class Measured:
    """A model's loss on held-out text, in nats per token, and its largest |logit| there, before any cap."""

    loss: float
    max_logit: float


@dataclass
class Run:
    """Continued training of one model at one learning rate: step → `Measured`, the first before training."""

    model: str
    rate: float
    measured: dict[int, Measured] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """The last step that was measured."""
        return max(self.measured)

    @property
    def loss(self) -> float:
        """The last loss that was measured."""
        return self.measured[self.steps].loss

    @property
    def rise(self) -> float:
        """The last loss minus the loss before training."""
        return self.loss - self.measured[0].loss

    @property
    def max_logit(self) -> float:
        """The largest |logit| of all measurements; NaN counts as larger than any number."""
        return max((each.max_logit for each in self.measured.values()), key=nan_as_inf)

    def row(self, steps: int) -> str:
        """A line of the table under `RUN_HEADER`; it names the last step if that is before `steps`."""
        losses = (f"{loss:.3f}" for loss in (self.measured[0].loss, self.loss))
        row = _aligned(f"rate {self.rate:<8g} {self.model}", *losses, format_fixed(self.max_logit, 1))
        return row if self.steps == steps else f"{row}  (after {self.steps} of {steps} steps)"

    def to_dict(self) -> dict[str, Any]:
        """The run as JSON-ready data, with a list of measurements."""
        points = [{"step": step, **asdict(each)} for step, each in self.measured.items()]
        return {"model": self.model, "rate": self.rate, "measured": points}


def _aligned(name: str, *cells: str) -> str:
    return f"   {name:26}" + "".join(f"{cell:>17}" for cell in cells)


def quoted(name: str, text: str) -> str:
    """A line of the table of texts, cut to the width of a terminal."""
    return f"   {name:12}{text!r}"[:WIDTH]


RUN_HEADER = _aligned("", "loss before", "loss after", "largest |logit|")


def conversion_table(conversion: Mapping[str, Measured]) -> str:
    """The held-out loss and the largest |logit| of each model after the conversion."""
    rows = (_aligned(name, f"{each.loss:.3f}", format_fixed(each.max_logit, 1)) for name, each in conversion.items())
    return "\n".join((_aligned("", "held-out loss", "largest |logit|"), *rows))


def summary(runs: list[Run], usual: float) -> str:
    """How both models ended, for each learning rate at which both were trained to the same step."""
    lines = []
    for rate in dict.fromkeys(run.rate for run in runs):
        pair = [run for run in runs if run.rate == rate]
        if len(pair) < 2 or pair[0].steps != pair[1].steps:
            continue
        lines.append(f"At a rate of {rate:g}" + ("" if rate == usual else f", {rate / usual:g} times {usual:g}") + ":")
        for run in pair:
            end = _above(run.rise, "its start")
            lines.append(f"   the {run.model} model ends {end}, with logits up to {run.max_logit:.0f};")
        apart = pair[1].loss - pair[0].loss
        compared = (
            f",\n   and {_above(apart, f'the end of the {pair[0].model} model')}." if math.isfinite(apart) else "."
        )
        lines[-1] = lines[-1].removesuffix(";") + compared
    return "\n".join(lines)


def _above(difference: float, reference: str) -> str:
    if not math.isfinite(difference):
        return "at a loss that is not finite"
    if abs(difference) < LEVEL:
        return f"level with {reference}"
    return f"{abs(difference):.3f} nats {'above' if difference > 0 else 'below'} {reference}"
