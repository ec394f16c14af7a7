"""The self-check: an operator on a problem of a few tiles, against the specification in fp64 under the error budget.

It changes no state of its caller: it draws from generators of its own and runs in a thread of its own, which has no
gradient mode, autocast, dispatch mode, saved-tensor hooks or stream of the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from threading import Thread
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from hf_qknorm.ops import flex, library, reference
from hf_qknorm.ops.cpu import attention as cpu_attention
from hf_qknorm.ops.cpu import norm_rope as cpu_norm_rope
from hf_qknorm.ops.error_budget import Verdict, verdict
from hf_qknorm.ops.tiled import HeadStatistics
from hf_qknorm.ops.trust.code_path import CodePath
from hf_qknorm.ops.trust.problems import Problem, problems
from hf_qknorm.ops.types import Heads, LayerCache

Results = dict[str, Tensor]
Compute = Callable[[Problem], Results]
SIGMAS = 6.0  # by which the share of dropped weights may miss the rate


class Finding(NamedTuple):
    """A result's name and its verdict."""

    name: str
    verdict: Verdict

    @property
    def excess(self) -> float:
        """The error as a share of its budget; infinite for NaN."""
        error, budget = self.verdict
        return error / budget if error <= torch.inf else torch.inf


def check(path: CodePath, device: torch.device) -> Finding:
    """The result of an operator on a device that is nearest to its budget, or farthest over it.

    Raises whatever the operator or the specification raises.
    """
    findings: list[Finding] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # of this thread
                for problem in problems(path, device):
                    findings.extend(compare(problem))
        except BaseException as failure:
            failures.append(failure)

    thread = Thread(target=run, name="hf_qknorm self-check", daemon=True)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return max(findings, key=lambda finding: finding.excess)


def compare(problem: Problem) -> list[Finding]:
    """The verdict on each output and each gradient."""
    operator, oracle = OPERATORS[problem.path.operator]
    leaves = _leaves(problem)
    got = _evaluate(operator, problem, leaves)
    exact, eager = (
        _evaluate(oracle, problem, _spread(problem, leaves, dtype)) for dtype in (torch.float64, problem.path.dtype)
    )
    findings = [Finding(name, verdict(x, exact[name], eager[name])) for name, x in got.items()]
    return findings if problem.dropout_mask is None else [*findings, _rate_of_dropout(problem)]


def _rate_of_dropout(problem: Problem) -> Finding:
    """The share of visible weights that are dropped."""
    assert problem.dropout_mask is not None
    rate, seen = problem.options.dropout, problem.seen.expand_as(problem.dropout_mask)
    dropped = float((problem.dropout_mask[seen] == 0).double().mean())
    return Finding(
        "rate of dropout", Verdict(abs(dropped - rate), SIGMAS * (rate * (1 - rate) / int(seen.sum())) ** 0.5)
    )


def _leaves(problem: Problem) -> Results:
    """The tensors that have gradients, by name."""
    q, k, v, q_norm, k_norm, _ = problem.heads
    named = {
        **{"q": q, "k": k, "v": v, "sinks": problem.visible.sinks},
        **{"gain of q": q_norm.gain, "bias of q": q_norm.bias, "gain of k": k_norm.gain, "bias of k": k_norm.bias},
    }
    gradient = problem.path.gradient
    return {name: x.detach().requires_grad_(gradient) for name, x in named.items() if x is not None}


def _spread(problem: Problem, leaves: Results, dtype: torch.dtype) -> Results:
    """The leaves in `dtype`, parameters expanded to all rows, so that their gradients are the terms of `verdict`."""
    made = {}
    for name, x in leaves.items():
        if name in ("q", "k", "v"):
            made[name] = x.detach().to(dtype)
            continue
        batch, heads, length, head_dim = leaves["q" if name == "sinks" else name[-1]].shape
        shape = (batch, length, heads) if name == "sinks" else (batch, length, heads, head_dim)
        made[name] = x.detach().to(torch.promote_types(dtype, torch.float32)).expand(shape)
    return {name: x.requires_grad_(problem.path.gradient) for name, x in made.items()}


def _evaluate(compute: Compute, problem: Problem, leaves: Results) -> Results:
    """Outputs for these leaves, and the leaves' gradients if the path has them."""
    q_norm, k_norm = (
        norm._replace(gain=leaves.get(f"gain of {x}"), bias=leaves.get(f"bias of {x}"))
        for x, norm in (("q", problem.heads.q_norm), ("k", problem.heads.k_norm))
    )
    heads = problem.heads._replace(q=leaves["q"], k=leaves["k"], v=leaves["v"], q_norm=q_norm, k_norm=k_norm)
    visible = problem.visible._replace(sinks=leaves.get("sinks"))
    outputs = compute(problem._replace(heads=heads, visible=visible))
    results = {name: x.detach() for name, x in outputs.items()}
    if not problem.path.gradient:
        return results
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(x.shape, generator=generator).to(problem.path.dtype).to(x) for x in outputs.values()]
    gradients = torch.autograd.grad([*outputs.values()], [*leaves.values()], upstream, allow_unused=True)
    return results | {f"gradient of {name}": x for name, x in zip(leaves, gradients, strict=True) if x is not None}


def _attended(problem: Problem) -> reference.Attended:
    """The specification's attention; sinks `[B, T, H]` are one for each query."""
    _, heads, visible, options, mask = problem
    if visible.sinks is not None:
        visible = visible._replace(sinks=visible.sinks.transpose(1, 2))
    return reference.attend(heads, visible, options, None if mask is None else mask.to(heads.q.dtype))


def _statistics(problem: Problem) -> Results:
    largest, entropy = library.fused_statistics(*problem[1:4])
    rows = problem.seen.any(-1).expand_as(entropy)
    entropy = entropy.where(rows, 0.0).sum((0, 2)) / rows.sum((0, 2)).clamp_min(1)
    return {"largest logit": largest.where(rows, 0.0).amax((0, 2)), "entropy": entropy}


def _by_head(found: reference.Attended | HeadStatistics) -> Results:
    return {"largest logit": found.max_logit, "entropy": found.entropy}


def _step(problem: Problem) -> Results:
    """The last keys and values belong to the new tokens, the others lie in the cache."""
    q, k, v = problem.heads[:3]
    old = k.shape[2] - q.shape[2]
    keys, values = (torch.cat([x[:, :, :old], torch.zeros_like(x[:, :, old:])], 2) for x in (k, v))
    filled = torch.tensor(old, device=q.device) if problem.path.operator == "step" else None
    cache = LayerCache(keys, values, filled)
    new = problem.heads._replace(k=k[:, :, old:], v=v[:, :, old:])
    out = library.fused_step(new, cache, problem.visible, problem.options)
    return {"output": out, "keys": keys[:, :, old:], "values": values[:, :, old:]}


def _step_oracle(problem: Problem) -> Results:
    (q, k, v, q_norm, k_norm, rotary), old = problem.heads, problem.heads.k.shape[2] - problem.heads.q.shape[2]
    gain, bias = (None if x is None else x[:, old:] for x in k_norm[1:3])  # of the new rows
    k_norm = k_norm._replace(gain=gain, bias=bias)
    q, new = reference.norm_rope(Heads(q, k[:, :, old:], v[:, :, old:], q_norm, k_norm, rotary))
    keys = torch.cat([k[:, :, :old], new], 2)
    out = _attended(problem._replace(heads=Heads(q, keys, v))).out
    return {"output": out, "keys": new, "values": v[:, :, old:]}


def _norm_rope(module: Any) -> Compute:
    return lambda problem: dict(zip(("queries", "keys"), module.norm_rope(problem.heads), strict=True))


def _norm_rope_one(module: Any) -> Compute:
    return lambda problem: {
        "queries": module.norm_rope_one(problem.heads.q, problem.heads.q_norm, problem.heads.rotary)
    }


def _oracle(problem: Problem) -> Results:
    return {"output": _attended(problem).out}


# Each operator, and its specification.
OPERATORS: Final[dict[str, tuple[Compute, Compute]]] = {
    "attention": (lambda problem: {"output": library.fused_attention(*problem[1:4])}, _oracle),
    "flex": (lambda problem: {"output": flex.checked_attention(*problem[1:4])}, _oracle),
    "cpu": (lambda problem: {"output": cpu_attention.attention(*problem[1:4])}, _oracle),
    "statistics": (_statistics, lambda problem: _by_head(_attended(problem))),
    "cpu_statistics": (
        lambda problem: _by_head(cpu_attention.head_statistics(*problem[1:4])),
        lambda problem: _by_head(_attended(problem)),
    ),
    "cpu_norm_rope": (_norm_rope_one(cpu_norm_rope), _norm_rope_one(reference)),
    "norm_rope": (_norm_rope(library), _norm_rope(reference)),
    "norm_rope_one": (_norm_rope_one(library), _norm_rope_one(reference)),
    "step": (_step, _step_oracle),
    "append": (_step, _step_oracle),
}
