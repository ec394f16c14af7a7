"""`HeadNorm`: a scheme's norm of queries, keys or values, over head_dim."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _has_any_global_hook

from hf_qknorm.norms import NORMS, PLAIN, Shape, shown_knee
from hf_qknorm.ops.reference import head_norm
from hf_qknorm.ops.types import Norm
from hf_qknorm.scheme import Scheme

# The scheme's norms in a layer, and the field of the scheme that each is for. Those with "rope" are for models whose
# heads are normed in two parts, with and without RoPE.
NORM_FIELDS: Final = {"q_norm": "q", "k_norm": "k", "v_norm": "v", "q_rope_norm": "q", "k_rope_norm": "k"}


class HeadNorm(nn.Module):
    """Normalise each head of `[B, T, H, D]` over D, then apply the scheme's gain and bias.

    The gain is `weight`: `[D]` (shared), `[H, D]` (per head), `[1]` (scalar) or None; `bias` has its shape.
    `knee` is a buffer `[3]`, the norm's `Shape`: (0, 0, 1) for the plain norm, whose ε is `eps`, the scheme's.
    `bypass` makes the module return its input: the model then computes what it did before it was patched.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    knee: Tensor
    own_eps: float | None = None  # the model's, which a calibration for an export takes

    def __init__(
        self,
        norm: str,
        scheme: Scheme,
        heads: int,
        head_dim: int,
        *,
        gain: bool = True,
        initial_gain: float = 1.0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.norm, self.p, self.initial_gain, self.head_dim = norm, scheme.p, initial_gain, head_dim
        self.eps = scheme.eps
        self.bypass = False
        shape = {"shared": (head_dim,), "per_head": (heads, head_dim), "scalar": (1,)}.get(scheme.gain)
        for name, wanted in (("weight", gain), ("bias", scheme.has_bias(norm))):
            value = torch.empty(shape, device=device, dtype=dtype) if shape and wanted else None
            self.register_parameter(name, None if value is None else nn.Parameter(value))
        # On the meta device only inside `torch.device("meta")`: vLLM builds parameters there, and buffers for real.
        real = None if device == torch.device("meta") else device
        self.register_buffer("knee", torch.tensor(PLAIN, dtype=dtype, device=real))
        self.reset_parameters()

    @property
    def order(self) -> float:
        """The order p of the mean |x|ᵖ that the norm divides by."""
        return NORMS[self.norm].order(self.p)

    @property
    def shape(self) -> Shape:
        """The numbers in `knee`; it waits for a GPU."""
        return Shape.of(self.knee)

    @property
    def ratio(self) -> float:
        """The knee: 0 for the plain norm, ∞ for an opened one. It waits for a GPU."""
        return self.shape.knee(self.order)

    @property
    def epsilon(self) -> float:
        """ε, which takes the place of the scheme's eps. It waits for a GPU."""
        return self.eps * float(2.0**self.shape.epsilon)

    def mean_power(self) -> float:
        """The mean |x|ᵖ in calibration text. Raises ValueError for a norm that does not keep it."""
        if not (power := self.shape.power):
            raise ValueError(
                "the norms hold no mean length of their inputs, as plain ones (a knee of 0) and those that are "
                "calibrated for an export: calibrate(model, data, knee=4) sets it"
            )
        return float((self.eps * 2.0**power) ** (self.order / 2))

    def rounded(self, knee: float, power: float, sharpness: float) -> Shape:
        """The shape of this norm for a knee and a mean |x|ᵖ of `power`; see `Shape.rounded`."""
        return Shape.rounded(knee, power, sharpness, self.eps, self.order)

    def length(self, shape: Shape | None = None) -> float:
        """The norm's factor beside its gain, in its own shape or another."""
        columns = self.head_dim if NORMS[self.norm].summed else 1
        return (shape or self.shape).length(self.eps, self.order, columns)

    @torch.no_grad()
    def set_shape(self, shape: Shape) -> None:
        """Set the norm's shape in place: graphs and kernels read the buffer."""
        self.knee.copy_(self.knee.new_tensor(shape))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set gains to their fresh value (1, or Henry's g), biases to 0 and the shape to the plain one."""
        if self.weight is not None:
            self.weight.fill_(self.initial_gain)
        if self.bias is not None:
            self.bias.zero_()
        if not self.knee.is_meta:
            self.set_shape(PLAIN)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Load as PyTorch does. An impossible or missing `knee` is an error, strict or not: gains fit one alone."""
        stored = [name for name in ("weight", "bias") if f"{prefix}{name}" in state_dict]
        own = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        if (knee := own.get(f"{prefix}knee")) is not None:
            if isinstance(knee, DTensor):
                own[f"{prefix}knee"] = knee = knee.to_local().to(knee.device_mesh.device_type)
            if problem := shape_problem(knee):
                args[-1].append(f"{prefix}knee {problem}")
            elif self.own_eps not in (None, self.eps) and not knee.is_meta and knee[0] and not knee[1]:
                args[-1].append(f"{prefix}knee is for an export, with the model's eps: patch with eps={self.own_eps:g}")
        elif stored:
            args[-1].append(f"{prefix}{stored[0]} is in the state dict and {prefix}knee is not. Restore the weights")
        super()._load_from_state_dict(own, prefix, *args)

    def forward(self, x: Tensor) -> Tensor:
        return x if self.bypass else head_norm(x, *self.as_norm())

    def as_norm(self) -> Norm:
        """Return the norm in the form that the operators take."""
        if self.bypass:
            return Norm()
        own: Any = self._parameters  # `nn.Module` searches as long as a small operator takes
        knee: Any = self._buffers["knee"]
        if torch.is_grad_enabled():  # it may move before the backward pass
            knee = knee.clone()
        kept = "weight" in own and "bias" in own  # parametrizations, pruning and FSDP keep them elsewhere
        gain, bias = (own["weight"], own["bias"]) if kept else (self.weight, self.bias)
        if isinstance(gain, DTensor) or isinstance(bias, DTensor):  # under tensor parallelism: this rank's part
            gain, bias = (x.to_local() if isinstance(x, DTensor) else x for x in (gain, bias))
        return Norm(self.norm, gain, bias, self.eps, self.p, knee)

    def extra_repr(self) -> str:
        order = f", p={self.p:g}" if NORMS[self.norm].any_order else ""
        gain = "none" if self.weight is None else list(self.weight.shape)
        shape = PLAIN if self.knee.is_meta else self.shape
        knee = f", knee={shown_knee(self.ratio)}, sharpness={shape.sharpness:g}" if shape.power else ""
        eps = self.eps if knee else self.eps * 2.0**shape.epsilon
        return f"{self.norm}{order}, gain={gain}, bias={self.bias is not None}, eps={eps:g}{knee}"


def shape_problem(knee: Tensor) -> str | None:
    """Return why a stored `knee` is no norm's shape, as the end of a sentence, or None."""
    if [*knee.shape] != [3]:
        return f"has shape {[*knee.shape]}, expected [3]. Restore the weights"
    if not knee.is_floating_point() or knee.itemsize < 2:
        return f"has dtype {str(knee.dtype).removeprefix('torch.')}, expected 16 bits or more. Restore the weights"
    if knee.is_meta:
        return None
    numbers = knee.tolist()
    if not (all(map(math.isfinite, numbers)) and numbers[2] >= 1):
        return f"is {numbers}, expected three finite numbers, the last at least 1. Restore the weights"
    return None


def active_copy(module: Any) -> nn.Module | None:
    """The module, or its copy for `modules_to_save` or LN tuning that PEFT's wrapper calls."""
    if module is None or not (held := module._modules):
        return module
    original: nn.Module | None = held.get("original_module", held.get("base_layer"))
    if original is None:
        return module
    copies = held.get("modules_to_save", held.get("ln_tuning_layers"))
    active = [] if module.disable_adapters or getattr(module, "merged", False) else module.active_adapters
    return copies[active[0]] if active and active[0] in copies else original


def is_unhooked(module: nn.Module) -> bool:
    """Whether calling the module runs its class's `forward` alone."""
    hooks = module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    return not (hooks or "forward" in vars(module) or _has_any_global_hook())  # type: ignore[no-untyped-call]


def initial_scalar_gain(scheme: Scheme, norm: str, max_positions: int, head_dim: int, scale: float) -> float:
    """Return the initial scalar gain of the queries: Henry's g = log2(L² − L), L = `max_positions`, for unit vectors.

    It is divided by `scale`, which multiplies q·k too, and for Lp by (‖x‖₂/‖x‖ₚ)² of a Gaussian x: then p does not
    change the size of the logits. For other norms it is 1.

    Source: Henry et al. 2020 (arXiv 2010.04245), §3.1.
    """
    if not NORMS[norm].summed:
        return 1.0
    g = math.log2(max(max_positions, 2) ** 2 - max(max_positions, 2)) / scale
    moment = 2 ** (scheme.p / 2) * math.gamma((scheme.p + 1) / 2) / math.sqrt(math.pi)  # E|z|ᵖ
    return g * (head_dim ** (1 / scheme.p - 0.5) * moment ** (1 / scheme.p)) ** 2
