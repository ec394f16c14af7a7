"""What a model predicts and how its attention looks, over a few batches: what reports are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_qknorm.families import FAMILIES
from hf_qknorm.families.class_names import TYPE_PREFIX
from hf_qknorm.model.attention import as_unpatched, head_norms, patched_layers
from hf_qknorm.model.hooks import input_device
from hf_qknorm.model.norms import HeadNorm
from hf_qknorm.stats.bounds import logit_bound
from hf_qknorm.stats.distributed import ONE_PROCESS, Ranks, full_tensor
from hf_qknorm.stats.logit_statistics import LogitStatistics, PassFilter, logit_statistics, watched_layers
from hf_qknorm.stats.records import LayerReport, LayerStatistics, Numbers, Prediction

Batches = Sequence[dict[str, Tensor]]
LAYER_FIELDS: Final = ("max_logit", "entropy", "over_half", "over_cap", "rms_q", "rms_k")  # those of every pass


def require_causal(config: Any) -> None:
    """Raise ValueError for a model that sees both sides: how it predicts the next token says nothing of it."""
    base_type = config.model_type.removeprefix(TYPE_PREFIX)
    if base_type in FAMILIES and not FAMILIES[base_type].is_causal(config):
        raise ValueError(
            f"this {base_type} sees both sides, and predicts no next token to judge it by. Patch it with patch_model, "
            "and train it"
        )


class Evaluation(NamedTuple):
    """A patched model beside itself unpatched: predictions (None without a language-modelling head), and layers."""

    base: Prediction | None
    own: Prediction | None
    before: dict[str, LayerStatistics]
    after: dict[str, LayerStatistics]


def evaluate(model: Any, batches: Batches, cap: float, ranks: Ranks = ONE_PROCESS) -> Evaluation:
    """Predictions and attention of a patched model, unpatched and as it is, in two forward passes a batch.

    Batches have "input_ids" `[B, T]` and perhaps "attention_mask". Large logits are counted against `cap`.
    """
    unpatched, patched = PassFilter(), PassFilter()
    with watched_layers(model, unpatched, cap) as before, watched_layers(model, patched, cap) as after:

        def watch(is_unpatched: bool) -> None:
            unpatched.watching, patched.watching = is_unpatched, not is_unpatched

        sums = _compared(model, batches, watch)
    base, own = _predictions(model, sums)
    return Evaluation(base, own, _at_rest(before, ranks), _at_rest(after, ranks))


def predictions(model: Any, batches: Batches) -> tuple[Prediction, Prediction] | tuple[None, None]:
    """How a patched model predicts unpatched, and as it is; Nones without a language-modelling head."""
    if model.get_output_embeddings() is None:
        return None, None
    return _predictions(model, _compared(model, batches, lambda is_unpatched: None))


@torch.no_grad()
def _compared(model: Any, batches: Batches, watch: Callable[[bool], None]) -> Tensor:
    """Sums over all tokens, as `_row_sums` has them; `watch(True)` comes before an unpatched pass, else False.

    A batch and a sequence at a time; padding neither predicts nor is predicted.
    """
    predicts = model.get_output_embeddings() is not None
    sums = torch.zeros(6, dtype=torch.float64)
    for batch in batches:
        inputs = {key: value.to(input_device(model)) for key, value in batch.items()}
        watch(True)
        with as_unpatched(model):
            base = model(**inputs, use_cache=False)
        watch(False)
        own = model(**inputs, use_cache=False)
        real = _real(inputs)
        for row in (
            range(len(real)) if predicts else ()
        ):  # a full_tensor batch's logits in fp32, twice, may be gigabytes
            sums += _row_sums(base.logits[row], own.logits[row], inputs["input_ids"][row], real[row])
    return sums


def _predictions(model: Any, sums: Tensor) -> tuple[Prediction, Prediction] | tuple[None, None]:
    if model.get_output_embeddings() is None:
        return None, None
    base_nll, own_nll, targets, kl, same, tokens = sums.tolist()
    targets = _some(targets)
    return Prediction(base_nll / targets), Prediction(own_nll / targets, max(kl / tokens, 0.0), same / tokens)


def _some(targets: float) -> float:
    if not targets:
        raise ValueError("no token of the data has a successor to predict: give longer sequences")
    return targets


def _real(inputs: dict[str, Tensor]) -> Tensor:
    """Which tokens are no padding, `[B, T]`."""
    return inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()


def _row_sums(base: Tensor, own: Tensor, ids: Tensor, real: Tensor) -> Tensor:
    """Of one sequence: both losses, targets, KL, agreements and tokens, summed; logits `[T, V]`, `real` `[T]`."""
    ids, real = ids.to(base.device), real.to(base.device)
    p, q = (F.log_softmax(x.float(), -1) for x in (base, own.to(base.device)))
    (base_nll, targets), (own_nll, _) = (_nll(x, ids, real) for x in (p, q))
    kl = F.kl_div(q, p, log_target=True, reduction="none").sum(-1)[real].sum()
    same = (p.argmax(-1) == q.argmax(-1))[real].sum()
    return torch.stack([base_nll, own_nll, targets, kl, same, real.sum()]).double().cpu()


def _nll(log_p: Tensor, ids: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Of one sequence: the summed loss of its next tokens, and how many there are."""
    follows = real[:-1] & real[1:]
    return -log_p[:-1].gather(-1, ids[1:, None]).squeeze(-1)[follows].sum(), follows.sum()


@torch.no_grad()
def layer_statistics(model: Any, batches: Batches, cap: float) -> dict[str, LayerStatistics]:
    """How the attention of a patched model looks, by layer; large logits are counted against `cap`."""
    with logit_statistics(model, cap) as watched:
        for batch in batches:
            inputs = {key: value.to(input_device(model)) for key, value in batch.items()}
            model.base_model(**inputs, use_cache=False)
    return _at_rest(watched, ONE_PROCESS)


def _at_rest(watched: Mapping[str, LogitStatistics], ranks: Ranks) -> dict[str, LayerStatistics]:
    """The statistics as plain numbers, of the heads of all ranks."""
    return {
        name: LayerStatistics(
            **{field: ranks.gather_heads(tuple(getattr(seen, field).tolist())) for field in LAYER_FIELDS},
            beyond_q=_known(ranks.gather_heads(tuple(seen.beyond_q.tolist()))),
            beyond_k=_known(ranks.gather_heads(tuple(seen.beyond_k.tolist()))),
        )
        for name, seen in watched.items()
    }


def _known(shares: Numbers) -> Numbers | None:
    """The shares by head; None where there is no knee."""
    return None if all(map(math.isnan, shares)) else shares


def layer_reports(
    model: Any, before: dict[str, LayerStatistics], after: dict[str, LayerStatistics]
) -> dict[str, LayerReport]:
    """Statistics of the unpatched and of the patched model by layer, with its gains and its bound on the logits."""
    reports = {}
    for name, layer in patched_layers(model).items():
        norms = head_norms(layer)
        reports[name] = LayerReport(
            before[name],
            after[name],
            _gain(norms.get("q_norm"), len(after[name].rms_q)),
            _gain(norms.get("k_norm"), len(after[name].rms_k)),
            logit_bound(layer),
        )
    return reports


def _gain(norm: HeadNorm | None, heads: int) -> Numbers | None:
    """The root mean square of each head's gain."""
    if norm is None or norm.weight is None:
        return None
    rows = full_tensor(norm.weight.detach()).double().view(-1, norm.weight.shape[-1])
    return tuple(rows.pow(2).mean(-1).sqrt().expand(heads).tolist())
