"""What a model predicts and how its attention looks, over a few batches: what reports are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_qknorm.attention import TYPE_PREFIX, as_unpatched, head_norms, patched_layers
from hf_qknorm.convert.report import LayerReport, LayerStatistics, Numbers, Prediction
from hf_qknorm.families import FAMILIES
from hf_qknorm.norms import HeadNorm
from hf_qknorm.scheme import SCHEMES
from hf_qknorm.training.monitor import logit_statistics

Batches = Sequence[dict[str, Tensor]]


def require_causal(config: Any) -> None:
    """Raise ValueError for a model that sees both sides: how it predicts the next token says nothing of it."""
    base_type = config.model_type.removeprefix(TYPE_PREFIX)
    if base_type in FAMILIES and not FAMILIES[base_type].is_causal(config):
        raise ValueError(
            f"this {base_type} sees both sides, and predicts no next token to judge it by. Patch it with patch_model, "
            "and train it"
        )


@torch.no_grad()
def predictions(model: Any, batches: Batches) -> tuple[Prediction, Prediction] | tuple[None, None]:
    """How a patched model predicts unpatched, and as it is; Nones without a language-modelling head.

    Batches have "input_ids" `[B, T]` and perhaps "attention_mask". A batch and a sequence at a time; padding neither
    predicts nor is predicted.
    """
    if model.get_output_embeddings() is None:
        return None, None
    unchanged = all(layer.scheme == SCHEMES["none"] for layer in patched_layers(model).values())
    sums = torch.zeros(6, dtype=torch.float64)
    for batch in batches:
        inputs = {key: value.to(model.device) for key, value in batch.items()}
        with as_unpatched(model):
            base = model(**inputs, use_cache=False).logits
        own = base if unchanged else model(**inputs, use_cache=False).logits
        real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
        for row in range(len(base)):  # the logits of a whole batch in fp32, twice, may be gigabytes
            sums += _row_sums(base[row], own[row], inputs["input_ids"][row], real[row])
    base_nll, own_nll, targets, kl, same, tokens = sums.tolist()
    if not targets:
        raise ValueError("no token of the data has a successor to predict: give longer sequences")
    return Prediction(base_nll / targets), Prediction(own_nll / targets, max(kl / tokens, 0.0), same / tokens)


def _row_sums(base: Tensor, own: Tensor, ids: Tensor, real: Tensor) -> Tensor:
    """Of one sequence: both losses, targets, KL, agreements and tokens, summed; logits `[T, V]`, `real` `[T]`."""
    ids, real = ids.to(base.device), real.to(base.device)
    p, q = (F.log_softmax(x.float(), -1) for x in (base, own.to(base.device)))
    follows = real[:-1] & real[1:]
    nll = [-x[:-1].gather(-1, ids[1:, None]).squeeze(-1)[follows].sum() for x in (p, q)]
    kl = F.kl_div(q, p, log_target=True, reduction="none").sum(-1)[real].sum()
    same = (p.argmax(-1) == q.argmax(-1))[real].sum()
    return torch.stack([*nll, follows.sum(), kl, same, real.sum()]).double().cpu()


@torch.no_grad()
def layer_statistics(model: Any, batches: Batches, cap: float) -> dict[str, LayerStatistics]:
    """How the attention of a patched model looks, by layer; large logits are counted against `cap`."""
    with logit_statistics(model, cap) as watched:
        for batch in batches:
            inputs = {key: value.to(model.device) for key, value in batch.items()}
            model.base_model(**inputs, use_cache=False)
    return {
        name: LayerStatistics(
            max_logit=tuple(seen.max_logit.tolist()),
            entropy=tuple(seen.entropy.tolist()),
            over_half=tuple(seen.over_half.tolist()),
            over_cap=tuple(seen.over_cap.tolist()),
            rms_q=tuple(seen.rms_q.tolist()),
            rms_k=tuple(seen.rms_k.tolist()),
        )
        for name, seen in watched.items()
    }


def layer_reports(
    model: Any, before: dict[str, LayerStatistics], after: dict[str, LayerStatistics]
) -> dict[str, LayerReport]:
    """Statistics of the unpatched and of the patched model, layer by layer, with the gains that it has now."""
    reports = {}
    for name, layer in patched_layers(model).items():
        norms = head_norms(layer)
        reports[name] = LayerReport(
            before[name],
            after[name],
            _gain(norms.get("q_norm"), len(after[name].rms_q)),
            _gain(norms.get("k_norm"), len(after[name].rms_k)),
        )
    return reports


def _gain(norm: HeadNorm | None, heads: int) -> Numbers | None:
    """The root mean square of each head's gain."""
    if norm is None or norm.weight is None:
        return None
    rows = norm.weight.detach().double().view(-1, norm.weight.shape[-1])
    return tuple(rows.pow(2).mean(-1).sqrt().expand(heads).tolist())
