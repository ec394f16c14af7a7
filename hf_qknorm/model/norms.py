"""`HeadNorm`: a scheme's norm of queries, keys or values, over head_dim."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _has_any_global_hook

from hf_qknorm.model.knee_state_dict import local_tensor, save_knee, saved_knee
from hf_qknorm.ops.apply_norm import apply_norm
from hf_qknorm.ops.norms import NORMS
from hf_qknorm.ops.reference import smooth_maximum
from hf_qknorm.ops.types import Norm
from hf_qknorm.scheme import Scheme

# The scheme's norms in a layer, and the field of the scheme that each is for. Those with "rope" are for models whose
# heads are normed in two parts, with and without RoPE.
NORM_FIELDS: Final = {"q_norm": "q", "k_norm": "k", "v_norm": "v", "q_rope_norm": "q", "k_rope_norm": "k"}


class HeadNorm(nn.Module):
    """Normalise each head of `[B, T, H, D]` over D, then apply the scheme's gain and bias.

    The gain is `weight`: `[D]` (shared), `[H, D]` (per head), `[1]` (scalar) or None; `bias` has its shape.
    `eps` is the scheme's, a float. With a `knee` it is a tensor `[]` in fp32 for every dtype of the model, filled by
    `set_knee`: eps^(p/2) = scheme.eps^(p/2) + knee·`power`, where `power` is the mean |x|ᵖ of the norm's inputs in
    calibration text (1 without calibration), and p is the `order`. It is no buffer, so that casts, sharding and the
    meta device leave it as it is: the config holds knee and power. It moves with the parameters, and to the device of
    its input at the first use there. State dicts hold it too, beside the gain that is right for this ε alone. The
    `sharpness` is the scheme's with a knee, else 1.
    `blend` b is a buffer during a blend: x becomes x + b·(y − x), where y is `rescale` times the normed x.
    `rescale` replaces the scheme's scale of the logits, which the attention applies only after the blend.
    `loaded_blend` is the blend at which `load_state_dict` last loaded the gain: 1 outside of a blend, None before.
    `bypass` makes the module return its input: the model then computes what it did before it was patched.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    blend: Tensor | None
    eps: float | Tensor
    scheme_sharpness: int = 1  # norms that older versions pickled lack it
    loaded_blend: float | None = None

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
        self.eps = self.scheme_eps = scheme.eps  # without a knee they are equal
        self.knee, self.scheme_sharpness = 0.0, scheme.sharpness
        self.bypass, self.rescale, self.loaded_blend = False, 1.0, None
        shape = {"shared": (head_dim,), "per_head": (heads, head_dim), "scalar": (1,)}.get(scheme.gain)
        for name, wanted in (("weight", gain), ("bias", scheme.has_bias(norm))):
            value = torch.empty(shape, device=device, dtype=dtype) if shape and wanted else None
            self.register_parameter(name, None if value is None else nn.Parameter(value))
        self.register_buffer("blend", None)
        self.set_knee(scheme.knee)
        if (device if self.weight is None else self.weight.device) == torch.device("meta"):
            self.expect_eps()
        self.reset_parameters()

    @property
    def order(self) -> float:
        """The order p of the mean |x|ᵖ that the norm divides by."""
        return NORMS[self.norm].order(self.p)

    @property
    def sharpness(self) -> int:
        """The norm's sharpness: the scheme's with a knee, else 1, since the plain norm is the same for all."""
        return self.scheme_sharpness if isinstance(self.eps, Tensor) else 1  # a graph has no guard on the knee

    def mean_power(self) -> float:
        """Return the mean |x|ᵖ in calibration text. Raises ValueError without a knee."""
        if not self.knee:
            raise ValueError("a norm without a knee keeps no mean of its inputs: calibrate(model, data) again")
        half = self.order / 2
        return max(float(self.eps) ** half - self.scheme_eps**half, 0.0) / self.knee  # ε is rounded: no mean is below 0

    def eps_of(self, knee: float, power: float) -> float:
        """Return ε for a knee above 0 and a mean |x|ᵖ of `power`. Raises ValueError if fp32 can't hold it."""
        half, limits = self.order / 2, torch.finfo(torch.float32)
        eps = (self.scheme_eps**half + knee * power) ** (1 / half) if power >= 0 else math.nan
        if not limits.tiny <= eps <= limits.max:
            raise ValueError(
                f"a knee of {knee:g} and a mean |x|ᵖ of {power:g} give ε = {eps:g}, expected {limits.tiny:.2g} to "
                f"{limits.max:.2g}, the range of fp32: check that the model's queries and keys are finite"
            )
        return eps

    def keeping_gain(self, knee: float, power: float) -> float:
        """Return the gain with which this knee keeps the length of vectors of mean |x|ᵖ `power`."""
        eps = (self.scheme_eps ** (self.order / 2) + knee * power) ** (2 / self.order)
        return self.divisor(power, eps, self.scheme_sharpness if knee else 1)

    def divisor(self, power: float, eps: float, sharpness: int) -> float:
        """Return the number that the norm with this ε and sharpness divides a vector of mean |x|ᵖ `power` by."""
        mean = torch.tensor(power, dtype=torch.float64)
        size = float(smooth_maximum(mean, eps ** (self.order / 2), sharpness))
        return (size * (self.head_dim if NORMS[self.norm].summed else 1)) ** (1 / self.order)

    @torch.no_grad()
    def set_knee(self, knee: float, power: float = 1.0) -> None:
        """Set the norm's knee, for a mean |x|ᵖ of `power`. A knee of 0 restores the scheme's eps.

        An existing tensor is filled in place, for graphs that read it. Raises ValueError, before anything changes, if
        fp32 can't hold ε.
        """
        if not knee:
            self._buffers.pop("eps", None)  # of `expect_eps`, if a loader left it
            self.eps, self.knee = self.scheme_eps, 0.0
            return
        eps, self.knee = self.eps_of(knee, power), knee
        if isinstance(self.eps, Tensor):
            self.eps.fill_(eps)
        else:
            with torch.inference_mode(False):  # for training afterwards
                self.eps = torch.full((), eps, dtype=torch.float32, device="cpu")

    def expect_eps(self) -> None:
        """Let a loader find the ε in the weights, by a buffer of that name, which nothing computes with."""
        if self.knee:  # the attribute precedes the buffer
            device = None if self.weight is None else self.weight.device
            self._buffers["eps"] = torch.empty((), dtype=torch.float32, device=device)

    @torch.no_grad()
    def take_eps(self, stored: Tensor) -> None:
        """Take a stored ε, of the norm's knee. Raises ValueError for an impossible one."""
        if problem := eps_problem(stored, self.scheme_eps):
            raise ValueError(f"eps {problem}")
        assert isinstance(self.eps, Tensor)
        self.eps.fill_(float(stored))

    def _apply(self, fn: Any, recurse: bool = True) -> HeadNorm:
        """Move and cast parameters as PyTorch does, and move ε beside them: a graph would copy it in each call."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if isinstance(self.eps, Tensor):
            device = fn(torch.empty_like(self.eps)).device  # norms without parameters move too
            if device.type != "meta":
                self.__dict__["eps"] = self.eps.to(device)  # never the buffer of `expect_eps`
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        save_knee(destination, prefix, self.knee, self.scheme_sharpness)
        destination.pop(f"{prefix}eps", None)  # of `expect_eps`
        if self.knee:
            destination[f"{prefix}eps"] = self.eps

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Load as PyTorch does, and take the ε of a knee."""
        metadata, _, missing, _, errors = args
        if f"{prefix}eps" in state_dict:
            self.knee, self.scheme_sharpness = saved_knee(metadata, self.knee, self.scheme_sharpness)
        self._buffers.pop("eps", None)
        stored = state_dict.get(f"{prefix}eps") if self.knee else None
        if stored is not None and not stored.is_meta:
            try:
                self.take_eps(local_tensor(stored))
            except ValueError as error:
                errors.append(f"{prefix}{error}")
        elif self.knee and stored is None and f"{prefix}weight" in state_dict:
            missing.append(f"{prefix}eps")  # the gain is of a norm without a knee
        if f"{prefix}weight" in state_dict:
            blend = state_dict.get(f"{prefix}blend", torch.ones(()))
            self.loaded_blend = None if blend.is_meta or blend.shape else float(local_tensor(blend))
        load: Any = super()._load_from_state_dict
        load({key: x for key, x in state_dict.items() if key != f"{prefix}eps" or not self.knee}, prefix, *args)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickle as PyTorch does. In pickles of older versions the knee's ε is a buffer."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if "eps" not in state and (stored := self._buffers.pop("eps")) is not None:  # else it is of `expect_eps`
            self.eps = stored

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set gains to their fresh value (1, or Henry's g) and biases to 0."""
        if self.weight is not None:
            self.weight.fill_(self.initial_gain)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        if self.bypass:
            return x
        return apply_norm(x, self.as_norm(x.device))

    def as_norm(self, device: torch.device) -> Norm:
        """Return the norm on that device, in the form that the operators take."""
        if self.bypass:
            return Norm()
        eps = self.eps
        if isinstance(eps, Tensor) and eps.device != device:
            eps = eps.to(device)
            if type(eps) is Tensor and not eps.is_meta and not eps.is_inference():  # not of a trace
                self.eps = eps
        weight, bias = self._held("weight"), self._held("bias")
        blend = self._buffers["blend"]
        if blend is None:
            return Norm(self.norm, weight, bias, None, eps, self.p, self.sharpness)
        gain = blend.new_ones(1) if weight is None else weight
        bias = None if bias is None else bias * self.rescale
        return Norm(self.norm, gain * self.rescale, bias, blend, eps, self.p, self.sharpness)

    def _held(self, name: str) -> Any:
        """The parameter of that name, or this rank's part of it: under tensor parallelism it is a DTensor.

        It is found without the search of `nn.Module`, which takes as long as a small operator. Parametrizations and
        FSDP's flat parameters keep it elsewhere.
        """
        held = self._parameters[name] if name in self._parameters else getattr(self, name)
        return held.to_local() if isinstance(held, DTensor) else held

    def extra_repr(self) -> str:
        order = f", p={self.p:g}" if NORMS[self.norm].any_order else ""
        gain = "none" if self.weight is None else list(self.weight.shape)
        blend = ""
        if self.blend is not None:
            blend = ", blend" if self.blend.is_meta else f", blend={float(self.blend):.3g}"
        knee = f", knee={self.knee:g}" + (f", sharpness={self.sharpness}" if self.sharpness > 1 else "")
        knee = knee if self.knee else ""
        bias, eps = self.bias is not None, f"{float(self.eps):g}"
        return f"{self.norm}{order}, gain={gain}, bias={bias}, eps={eps}{knee}{blend}"


def eps_problem(eps: Tensor, least: float) -> str | None:
    """Return why a norm with a knee can't have a stored `eps`, as the end of a sentence, or None."""
    if eps.shape:
        return f"has shape {list(eps.shape)}, expected a single number []. Restore the weights"
    if not eps.is_floating_point() or eps.itemsize < 2:
        return f"has dtype {str(eps.dtype).removeprefix('torch.')}, expected float32. Restore the weights"
    if not eps.is_meta and not eps.new_tensor(least) <= eps < math.inf:  # true for NaN too
        return f"is {float(eps):g}, expected a finite number ≥ {least:g}, the scheme's eps. Restore the weights"
    return None


def active_copy(module: Any) -> nn.Module | None:
    """The module, or its copy for `modules_to_save` or LN tuning that PEFT's wrapper calls."""
    held: Any = {} if module is None else module._modules
    original: nn.Module | None = held.get("original_module", held.get("base_layer"))
    if original is None:
        return module
    copies = held.get("modules_to_save", held.get("ln_tuning_layers"))
    active = [] if module.disable_adapters or getattr(module, "merged", False) else module.active_adapters
    return copies[active[0]] if active and active[0] in copies else original


def is_unhooked(module: nn.Module) -> bool:
    """Whether calling the module runs its class's `forward`, after what `run_pre_hooks` runs, and nothing else."""
    hooks = (module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(hooks) or module._forward_pre_hooks_with_kwargs or "forward" in vars(module):
        return False
    return not _has_any_global_hook()  # type: ignore[no-untyped-call]


def run_pre_hooks(module: nn.Module, x: Tensor) -> Tensor:
    """The input of the module after its forward pre-hooks, such as those of an observer, which may replace it."""
    for hook in module._forward_pre_hooks.values():
        replaced = hook(module, (x,))
        if replaced is not None:
            x = replaced[0] if isinstance(replaced, tuple) else replaced
    return x


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
