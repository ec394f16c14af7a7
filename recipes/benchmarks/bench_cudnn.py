"""cuDNN's attention with a cap, causal, through nvidia-cudnn-frontend: torch's SDPA has no cap.

The cap is a function of the scores. Beside such a function cuDNN takes no mask, so that causality is part of it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import cudnn
import torch
from torch import Tensor

FLOAT, INDEX, TRUTH = cudnn.data_type.FLOAT, cudnn.data_type.INT32, cudnn.data_type.BOOLEAN
TYPES = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF, torch.float32: FLOAT}
PLANS: dict[Any, tuple[Any, dict[str, Any]]] = {}  # graphs and their tensors, by operation, dtype and layout


class Scores:
    """The function of the scores and its derivative. Weights of hidden keys are 0, so the derivative needs no mask."""

    def __init__(self, cap: Any, hidden: Any) -> None:
        self.cap, self.hidden = cap, hidden
        self.argument: Any = None  # of tanh

    def forward(self, graph: Any, score: Any) -> Any:
        self.argument = typed(graph.div(a=score, b=self.cap, compute_data_type=FLOAT), FLOAT)
        logit = typed(graph.mul(a=typed(graph.tanh(input=self.argument), FLOAT), b=self.cap), FLOAT)
        row, column = (typed(graph.gen_index(input=logit, axis=axis), INDEX) for axis in (2, 3))
        seen = typed(graph.cmp_ge(input=row, comparison=column, compute_data_type=TRUTH), TRUTH)
        return graph.binary_select(input0=logit, input1=self.hidden, mask=seen)

    def backward(self, graph: Any, gradient: Any) -> Any:
        return graph.tanh_backward(loss=gradient, input=self.argument, compute_data_type=FLOAT)


def typed(x: Any, kind: Any) -> Any:
    x.set_data_type(kind)
    return x


@cache
def handle() -> Any:
    return cudnn.create_handle()


def run(operation: str, softcap: float, inputs: dict[str, Tensor], results: dict[str, Tensor]) -> None:
    """Run `sdpa` or `sdpa_backward`, and write its results in their order."""
    numbers = {"cap": softcap, "hidden": torch.finfo(torch.float32).min}
    constants = {name: torch.full((1, 1, 1, 1), x) for name, x in numbers.items()}  # on the CPU: taken by value
    key = (operation, inputs["q"].dtype, *((x.shape, x.stride()) for x in inputs.values()))
    if key not in PLANS:
        PLANS[key] = build(operation, inputs, results, constants)
    graph, tensors = PLANS[key]
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda")
    cudnn.set_stream(handle=handle(), stream=torch.cuda.current_stream().cuda_stream)
    graph.execute({tensors[n]: x for n, x in (inputs | constants | results).items()}, workspace, handle=handle())


def build(
    operation: str, inputs: dict[str, Tensor], results: dict[str, Tensor], constants: dict[str, Tensor]
) -> tuple[Any, dict[str, Any]]:
    q = inputs["q"]
    graph = cudnn.pygraph(
        io_data_type=TYPES[q.dtype], intermediate_data_type=FLOAT, compute_data_type=FLOAT, handle=handle()
    )
    tensors = {name: graph.tensor_like(x) for name, x in (inputs | constants).items()}
    scores = Scores(tensors["cap"], tensors["hidden"])
    options = {"generate_stats": True} if operation == "sdpa" else {"score_mod_bprop": scores.backward}
    options |= {"attn_scale": q.shape[-1] ** -0.5, "score_mod": scores.forward}
    made = getattr(graph, operation)(**{name: tensors[name] for name in inputs}, **options)
    for (name, like), x in zip(results.items(), made, strict=True):
        x.set_output(True).set_dim(list(like.shape)).set_stride(list(like.stride())).set_data_type(TYPES[like.dtype])
        tensors[name] = x
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    return graph, tensors


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, softcap: float) -> Tensor:
        inputs = {"q": q.detach(), "k": k.detach(), "v": v.detach()}
        out, stats = torch.empty_like(q), torch.empty(*q.shape[:3], 1, dtype=torch.float32, device=q.device)
        run("sdpa", softcap, inputs, {"out": out, "stats": stats})
        ctx.save_for_backward(q, k, v, out, stats)
        ctx.softcap = softcap
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = dict(zip(("q", "k", "v", "o", "stats"), ctx.saved_tensors, strict=True))
        inputs = {name: x.detach() for name, x in (inputs | {"dO": grads[0]}).items()}
        results = {f"d{name}": torch.empty_like(inputs[name]) for name in ("q", "k", "v")}
        run("sdpa_backward", ctx.softcap, inputs, results)
        return *results.values(), None


def attention(q: Tensor, k: Tensor, v: Tensor, softcap: float) -> Tensor:
    """Causal attention with a cap, over q `[B, H, T, D]` and k, v `[B, Hk, T, D]`."""
    out: Tensor = Attention.apply(q, k, v, softcap)
    return out
