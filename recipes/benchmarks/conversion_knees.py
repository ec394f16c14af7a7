"""Compare extensions of a single knee: other statistics, other gains, other splits.

    python recipes/benchmarks/conversion_knees.py --checkpoint ../shared/checkpoints/llama-shakespeare \
        --text ../shared/data/tinyshakespeare.txt --part knees

A knee trades a bound on the logits for what the model keeps, so that variants are compared at equal bounds. Each row
has a variant's bound (of the worst layer), its rise in loss, its KL from the unpatched model, and the ratio of this KL
to that of the plain recipe (one knee, mean squares, shared gains, moments) at the same bound. A ratio below 1 is an
improvement. Gains are fitted to 8 batches of 8×256 tokens; losses are over 8 batches of the last tenth. Prints
Markdown.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from conversion import BATCH, LENGTH, SHARED, Story, run
from least_squares import Key, norms, put, solve, squares
from torch import Tensor

from hf_qknorm import Scheme, patch_model
from hf_qknorm.measure.bounds import logit_bound
from hf_qknorm.measure.text import sample_batches
from hf_qknorm.model.attention import QKNormAttention, patched_layers
from hf_qknorm.model.norms import HeadNorm

CURVE = (1.0, 2.0, 4.0, 8.0, 16.0)
KNEES = (4.0,)
FITTED, JUDGED = 8, 8
Epsilons = Callable[[float, Mapping[Key, Tensor]], Mapping[Key, Tensor]]  # of a knee and of squares [N, H], per norm


class Judge:
    """A trained model, its predictions on held-out text, and the plain recipe's curve of KL over bound."""

    def __init__(self, story: Story) -> None:
        self.base = story.base
        self.fitted = [{"input_ids": batch} for batch in story.calibration[:FITTED]]
        self.batches = sample_batches(story.unseen, JUDGED, BATCH, LENGTH, seed=0)
        self.targets = [self.log_probabilities(self.base, batch) for batch in self.batches]
        self.loss = self.mean_loss(self.targets)
        self.squares: dict[Any, dict[Key, Tensor]] = {}
        self.curve = sorted(self.measure(self.plain(knee))[0:3:2] for knee in CURVE)

    @torch.no_grad()
    def log_probabilities(self, model: Any, batch: Tensor) -> Tensor:
        return F.log_softmax(model(batch, use_cache=False).logits, -1)

    def mean_loss(self, predicted: list[Tensor]) -> float:
        losses = [
            F.nll_loss(p[:, :-1].flatten(0, 1), b[:, 1:].flatten())
            for p, b in zip(predicted, self.batches, strict=True)
        ]
        return float(sum(losses)) / len(losses)

    def measure(self, model: Any, bound: float | None = None) -> tuple[float, float, float]:
        """The bound, the rise in loss and the KL of a model."""
        predicted = [self.log_probabilities(model.eval(), batch) for batch in self.batches]
        pairs = zip(predicted, self.targets, strict=True)
        kl = sum(float(F.kl_div(p, t, log_target=True, reduction="none").sum(-1).mean()) for p, t in pairs)
        return bound or worst_bound(model), self.mean_loss(predicted) - self.loss, kl / len(predicted)

    def plain(self, knee: float) -> Any:
        return self.knee(SHARED, knee, whole(Tensor.mean))

    def knee(self, scheme: Scheme, knee: float, epsilons: Epsilons) -> Any:
        """A model with these knees, and gains from moments."""
        model = patch_model(copy.deepcopy(self.base), scheme)
        put(model, epsilons(knee, self.seen(model)))
        solve(model, self.fitted)
        return model

    def seen(self, model: Any) -> dict[Key, Tensor]:
        """`squares` in the fitted batches: those of models with the same norms are the same."""
        kinds = tuple((key, norm.norm) for key, norm in norms(model).items())
        if kinds not in self.squares:
            self.squares[kinds] = squares(model, self.fitted)
        return self.squares[kinds]

    def plain_kl(self, bound: float) -> float:
        """The plain recipe's KL at a bound: log-log between, and beyond, the points of its curve."""
        index = next((i for i, (at, _) in enumerate(self.curve) if at >= bound), len(self.curve) - 1)
        (b0, k0), (b1, k1) = self.curve[max(index, 1) - 1], self.curve[max(index, 1)]
        share = math.log(bound / b0) / math.log(b1 / b0)
        return math.exp((1 - share) * math.log(k0) + share * math.log(k1))

    def row(self, label: str, model: Any, bound: float | None = None) -> None:
        bound, rise, kl = self.measure(model, bound)
        ratio = f"{kl / self.plain_kl(bound):.2f}" if math.isfinite(bound) else "no bound"
        print(f"| {label} | {bound:.0f} | {rise:+.4f} | {kl:.5f} | {ratio} |", flush=True)

    def head(self) -> None:
        print("\n| variant, knee | bound | rise | KL | KL over the plain recipe's at that bound |")
        print("|---|---:|---:|---:|---:|")


def worst_bound(model: Any) -> float:
    """Return the largest bound on |logit| over the layers; infinity where queries or keys have no norm."""
    return max(bound_of(layer) for layer in patched_layers(model).values())


def bound_of(layer: QKNormAttention) -> float:
    bound = logit_bound(layer)
    return math.inf if bound is None else bound


def whole(statistic: Callable[[Tensor], Tensor]) -> Epsilons:
    """Set ε = knee · (a statistic of the squares of all heads)."""
    return lambda knee, seen: {key: knee * statistic(x) for key, x in seen.items()}


def by_head(knee: float, seen: Mapping[Key, Tensor]) -> Mapping[Key, Tensor]:
    return {key: knee * x.mean(0)[:, None] for key, x in seen.items()}


def split(q: float, k: float) -> Epsilons:
    """Set different knees for queries and keys, as multiples of the knee."""
    factors = {"q_norm": q, "k_norm": k}
    return lambda knee, seen: {key: knee * factors[key[1]] * x.mean() for key, x in seen.items()}


def equal_bounds(judge: Judge) -> Epsilons:
    """Choose a knee per layer such that all layers have nearly the same bound, which grows with 1 + knee."""
    model = judge.plain(4.0)
    bounds = {name: bound_of(layer) for name, layer in patched_layers(model).items()}
    middle = math.exp(sum(map(math.log, bounds.values())) / len(bounds))

    def epsilons(knee: float, seen: Mapping[Key, Tensor]) -> Mapping[Key, Tensor]:
        own = {name: max((1 + knee) * middle / bound - 1, 0.0) for name, bound in bounds.items()}
        return {key: own[key[0]] * x.mean() for key, x in seen.items()}

    return epsilons


def statistics(judge: Judge) -> None:
    """Compare the statistics of the squares that ε is a multiple of."""
    variants = {
        "mean (the plain recipe)": whole(Tensor.mean),
        "mean of each head": by_head,
        "median": whole(Tensor.median),
        "90 % quantile": whole(lambda x: x.flatten().sort().values[int(0.9 * x.numel())]),
        "geometric mean": whole(lambda x: x.clamp_min(1e-12).log().mean().exp()),
        "queries' knee doubled, keys' halved": split(2.0, 0.5),
        "queries' knee halved, keys' doubled": split(0.5, 2.0),
        "queries' knee a quarter, keys' four times": split(0.25, 4.0),
        "queries' knee an eighth, keys' eight times": split(0.125, 8.0),
        "layers' bounds made equal": equal_bounds(judge),
    }
    for (label, epsilons), knee in itertools.product(variants.items(), KNEES):
        judge.row(f"{label}, {knee:g}", judge.knee(SHARED, knee, epsilons))


def schemes(judge: Judge) -> None:
    """Compare norms and gains beside the knee."""
    mean = whole(Tensor.mean)
    variants: dict[str, tuple[Scheme, Epsilons]] = {
        "RMSNorm": (Scheme(q="rms", k="rms"), mean),
        "RMSNorm with a bias": (Scheme(q="rms", k="rms", bias=True), mean),
        "LayerNorm without a bias": (Scheme(q="layer", k="layer", bias=False), mean),
        "LayerNorm with a bias": (Scheme(q="layer", k="layer"), mean),
        "gains per head": (Scheme(q="auto", k="auto", gain="per_head"), mean),
        "gains and knees per head": (Scheme(q="auto", k="auto", gain="per_head"), by_head),
        "one scalar a layer": (Scheme(q="auto", k="auto", gain="scalar"), mean),
        "queries alone": (Scheme(q="auto"), mean),
        "keys alone": (Scheme(k="auto"), mean),
    }
    for (label, (scheme, epsilons)), knee in itertools.product(variants.items(), KNEES):
        judge.row(f"{label}, {knee:g}", judge.knee(scheme, knee, epsilons))


def shapes(judge: Judge) -> None:
    """Compare other saturations: x/(1 + (mean x²/ε)^(s/2))^(1/s), where s = 2 is the norm and s = ∞ clips lengths."""
    for order, knee in itertools.product((2.0, 4.0, math.inf), KNEES):
        model = patch_model(copy.deepcopy(judge.base), SHARED)
        seen = judge.seen(model)
        for key, norm in norms(model).items():
            norm.forward = saturating(norm, float(knee * seen[key].mean()), order)  # type: ignore[method-assign]
        bounds = []
        for name, layer in patched_layers(model).items():
            q, k = (float(seen[name, norm].mean()) for norm in ("q_norm", "k_norm"))
            bounds.append(layer.own_scale * layer.head_dim * knee * (q * k) ** 0.5)
        judge.row(f"s = {order:g}, gains 1, {knee:g}", model, max(bounds))


def saturating(norm: HeadNorm, eps: float, order: float) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True) if norm.norm == "layer" else 0.0
        ratio = ((x - mean).pow(2).mean(-1, keepdim=True) / eps).sqrt()
        if math.isinf(order):
            return mean + (x - mean) / ratio.clamp_min(1.0)
        return mean + (x - mean) / (1 + ratio.pow(order)).pow(1 / order)

    return forward


def knees(story: Story) -> None:
    """Run all comparisons."""
    judge = Judge(story)
    judge.head()
    for part in (statistics, schemes, shapes):
        part(judge)


if __name__ == "__main__":
    run([knees], __doc__)
