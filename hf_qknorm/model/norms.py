"""`HeadNorm`: the norm over head_dim that a scheme puts on queries, keys or values."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from hf_qknorm.model.knee_states import plain
from hf_qknorm.ops.norms import NORMS
from hf_qknorm.ops.reference import head_norm
from hf_qknorm.ops.types import Norm
from hf_qknorm.scheme import Scheme


class HeadNorm(nn.Module):
    """Normalise each head of `[B, T, H, D]` over D, then apply the scheme's gain and bias.

    The gain is `weight`: `[D]` (shared), `[H, D]` (per head), `[1]` (scalar) or None; `bias` has its shape.
    `eps` is the scheme's, a float. With a `knee` it is a buffer, `[]` in fp32 whatever the model's dtype, which
    `set_knee` fills: eps^(p/2) = scheme.eps^(p/2) + knee·`power`, where `power` is the mean |x|ᵖ of the vectors that
    arrive in calibration text, and p is the `order`. Until then `power` is 1.
    `blend` is a buffer while the norm is on its way in: with b, x becomes x + b·(y − x), where y is `rescale` times the
    normed x (`rescale` stands for a scale of the logits that the attention does not apply before the blend is over).
    While `bypass` is set the module returns its input: the model then computes what it did before it was patched.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    blend: Tensor | None
    eps: float | Tensor

    def __init__(
        self,
        norm: str,
        scheme: Scheme,
        heads: int,
        head_dim: int,
        *,
        gain: bool = True,
        fresh: float = 1.0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.norm, self.p, self.fresh = norm, scheme.p, fresh
        self.floor = scheme.eps  # ε without a knee
        self.eps = self.floor
        self.knee = 0.0
        self.bypass, self.rescale = False, 1.0
        shape = {"shared": (head_dim,), "per_head": (heads, head_dim), "scalar": (1,)}.get(scheme.gain)
        for name, wanted in (("weight", gain), ("bias", scheme.has_bias(norm))):
            value = torch.empty(shape, device=device, dtype=dtype) if shape and wanted else None
            self.register_parameter(name, None if value is None else nn.Parameter(value))
        self.register_buffer("blend", None)
        self.set_knee(scheme.knee, device=device)
        self.reset_parameters()

    @property
    def order(self) -> float:
        """p: the order of the mean |x|ᵖ that the norm divides by."""
        return NORMS[self.norm].order(self.p)

    @property
    def power(self) -> float:
        """The mean |x|ᵖ in calibration text, as `set_knee` was given it.

        Raises ValueError without a knee, and for one that is offloaded.
        """
        if not self.knee:
            raise ValueError("a norm without a knee keeps no mean of what arrives there: calibrate(model, data) again")
        self.check_present()
        half = self.order / 2
        return max(float(self.eps) ** half - self.floor**half, 0.0) / self.knee  # ε is rounded: less is no mean

    def eps_of(self, knee: float, power: float) -> float:
        """The ε of a knee above 0 for a mean |x|ᵖ of `power`. Raises ValueError for one that fp32 does not hold."""
        half, limits = self.order / 2, torch.finfo(torch.float32)
        eps = (self.floor**half + knee * power) ** (1 / half) if power >= 0 else math.nan
        if not limits.tiny <= eps <= limits.max:
            raise ValueError(
                f"a knee of {knee:g} and a mean |x|ᵖ of {power:g} give ε = {eps:g}, expected {limits.tiny:.2g} to "
                f"{limits.max:.2g}, as fp32 holds it: check that the model's queries and keys are finite"
            )
        return eps

    @torch.no_grad()
    def set_knee(self, knee: float, power: float = 1.0, device: torch.device | None = None) -> None:
        """Give the norm a knee, for a mean |x|ᵖ of `power`; with a knee of 0 it is the scheme's plain norm again.

        A buffer that is there is filled in place, so that graphs which read it stay right. A new one is made on
        `device`, by default the gain's. Raises ValueError, before anything changes, for an ε that fp32 does not hold,
        and for one that is offloaded, which would not keep the change.
        """
        self.check_present()
        if not knee:
            del self.eps
            self.eps, self.knee = self.floor, 0.0
            return
        eps, self.knee = self.eps_of(knee, power), knee
        if isinstance(self.eps, Tensor):
            self.eps.fill_(eps)
            return
        del self.eps
        device = device or (None if self.weight is None else self.weight.device)
        self.register_buffer("eps", torch.full((), eps, dtype=torch.float32, device=device))

    def check_present(self) -> None:
        """Raise ValueError for a knee whose number is not in memory."""
        if isinstance(self.eps, Tensor) and self.eps.is_meta:
            raise ValueError(
                "the eps of a norm is on the meta device: load the model without offload_buffers=True, or load its "
                "weights first"
            )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = self.eps
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if isinstance(before, Tensor) and isinstance(self.eps, Tensor):
            if self.eps.dtype != before.dtype:
                self.eps = before.to(self.eps.device)  # a model may be cast, its knees are not
            if before.is_meta and not self.eps.is_meta:
                self.set_knee(self.knee)  # `to_empty` leaves any number there
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """PyTorch's own, which would take the first entry of an eps of another shape, and any number."""
        *_, errors = args
        stored = state_dict.get(f"{prefix}eps") if isinstance(self.eps, Tensor) else None
        if stored is not None and (problem := eps_problem(plain(stored), self.floor)):
            errors.append(f"{prefix}eps {problem}")
            return
        load: Any = super()._load_from_state_dict
        load(state_dict, prefix, *args)
        if isinstance(self.eps, Tensor):
            self.eps = plain(self.eps).float()  # `assign=True` takes the dtype too

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set gains to their fresh value (1, or Henry's g) and biases to 0."""
        if self.weight is not None:
            self.weight.fill_(self.fresh)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        if self.bypass:
            return x
        norm = self.as_norm()
        return head_norm(x, norm.kind, norm.gain, norm.bias, norm.eps, norm.p, norm.blend)

    def as_norm(self) -> Norm:
        """What the module does, as the operators take it."""
        if self.bypass:
            return Norm()
        weight, bias = _of_this_rank(self.weight), _of_this_rank(self.bias)
        if self.blend is None:
            return Norm(self.norm, weight, bias, None, self.eps, self.p)
        gain = self.blend.new_ones(1) if weight is None else weight
        bias = None if bias is None else bias * self.rescale
        return Norm(self.norm, gain * self.rescale, bias, self.blend, self.eps, self.p)

    @property
    def bare(self) -> bool:
        """Whether nothing but `forward` happens when the module is called: no hooks, no wrapper."""
        return type(self) is HeadNorm and is_unhooked(self)

    def extra_repr(self) -> str:
        order = f", p={self.p:g}" if NORMS[self.norm].any_order else ""
        gain = "none" if self.weight is None else list(self.weight.shape)
        blend = ""
        if self.blend is not None:
            blend = ", blend" if self.blend.is_meta else f", blend={float(self.blend):.3g}"
        eps = "buffer" if isinstance(self.eps, Tensor) and self.eps.is_meta else f"{float(self.eps):g}"
        knee = f", knee={self.knee:g}" if self.knee else ""
        return f"{self.norm}{order}, gain={gain}, bias={self.bias is not None}, eps={eps}{knee}{blend}"


def eps_problem(eps: Tensor, least: float) -> str | None:
    """The reason why a stored `eps` can't be that of a norm with a knee, as the end of a sentence; None if it can."""
    if eps.shape:
        return f"has shape {list(eps.shape)}, expected a single number []. Restore the weights"
    if not eps.is_floating_point() or eps.itemsize < 2:
        return f"has dtype {str(eps.dtype).removeprefix('torch.')}, expected float32. Restore the weights"
    if not eps.is_meta and not eps.new_tensor(least) <= eps < math.inf:  # false for NaN too
        return (
            f"is {float(eps):g}, expected a finite number of at least the scheme's eps, {least:g}. Restore the weights"
        )
    return None


def is_unhooked(module: nn.Module) -> bool:
    """Whether a call of the module is a call of its class's `forward`, and nothing else."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return not any(hooks) and "forward" not in vars(module)


def _of_this_rank(parameter: Any) -> Tensor | None:
    """A gain as the heads of this rank have it: under tensor parallelism it is a DTensor, sharded by head."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def fresh_scalar(scheme: Scheme, norm: str, max_positions: int, head_dim: int, scale: float) -> float:
    """What a scalar query gain starts from: Henry's g = log2(L² − L), L = `max_positions`, for unit vectors.

    Source: Henry et al. 2020 (arXiv 2010.04245), §3.1. It is divided by `scale`, which multiplies q·k as well, and for
    Lp by (‖x‖₂/‖x‖ₚ)² of a Gaussian x, so that p does not change the size of the logits. Other norms start from 1.
    """
    if not NORMS[norm].summed:
        return 1.0
    g = math.log2(max(max_positions, 2) ** 2 - max(max_positions, 2)) / scale
    moment = 2 ** (scheme.p / 2) * math.gamma((scheme.p + 1) / 2) / math.sqrt(math.pi)  # E|z|ᵖ
    return g * (head_dim ** (1 / scheme.p - 0.5) * moment ** (1 / scheme.p)) ** 2
