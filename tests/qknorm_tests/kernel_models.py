"""Patched models through the fused kernels, interpreted where there is no GPU, and the operators that they call."""

from typing import Any

import torch
from torch import Tensor

from hf_qknorm import Scheme, patch_model
from qknorm_tests import interpreter
from qknorm_tests.tables import TRIED, make_batch, randomise, sharp_model

interpreter.install()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def batch(kind: str, **options: bool) -> dict[str, Any]:
    """Of rows that are alike, one: an interpreter takes as long for each."""
    found = make_batch(kind, **options)
    if kind == "plain":
        found = {name: x[:1] if isinstance(x, Tensor) else x for name, x in found.items()}
    return {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in found.items()}


def outputs(model: Any, backend: str, kind: str, use_cache: bool = False) -> dict[str, Tensor]:
    """Logits, loss and every gradient."""
    model.set_attn_implementation(backend)
    model.zero_grad()
    result = model(**{**batch(kind), "use_cache": use_cache})
    result.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": result.logits.detach(), "loss": result.loss.detach(), **grads}


OTHERS = {
    "l2, knee": Scheme(q="l2", k="l2", scale=8.0, gain="per_head", softcap=50.0),
    "lp, knee": Scheme(q="lp", k="lp", p=3.0, scale=8.0),
}


def patched(model_type: str, scheme: str) -> Any:
    layers = 2 if model_type in ("gemma2", "mimo_v2_flash") else 1  # these have layers that differ
    model = sharp_model(model_type, num_hidden_layers=layers)
    patch_model(model, {**TRIED, **OTHERS}[scheme], attn_implementation="hf_qknorm_eager")
    randomise(model, knee=2.0 if "knee" in scheme else 0.0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # gains of one hide mistakes, of the model's own norms too
        for name, p in model.named_parameters():
            if "_norm." in name and "self_attn" in name:
                p.add_(0.3 * torch.randn(p.shape, generator=generator))
    return model.to(DEVICE)


def counted(function, calls: list):  # type: ignore[no-untyped-def]
    def call(*arguments, **options):  # type: ignore[no-untyped-def]
        calls.append(arguments)
        return function(*arguments, **options)

    return call
