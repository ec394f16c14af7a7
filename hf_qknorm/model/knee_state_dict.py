"""The knees' ε in a patched layer's state dict."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

_LOADING = ContextVar("transformers is loading a checkpoint", default=False)


@contextmanager
def switched_on(switch: ContextVar[bool]) -> Iterator[None]:
    """A context in which the switch is True."""
    token = switch.set(True)
    try:
        yield
    finally:
        switch.reset(token)


def loading() -> AbstractContextManager[None]:
    """Mark that transformers is loading a checkpoint into a model."""
    return switched_on(_LOADING)


class KneeStateDict(nn.Module):
    """A mixin for layers whose norms may have a knee: adapts state dicts to FSDP, and checks loaded ones."""

    config: Any
    scheme: Any

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return PyTorch's state dict. In a sharded layer on the meta device, a knee's eps is a replicated DTensor.

        accelerate's `fsdp_cpu_ram_efficient_loading` reads the mesh of each tensor, to send it there from rank 0.
        While transformers loads a checkpoint, eps stays a plain tensor: it would shard a DTensor along an axis.
        """
        state = super().state_dict(*args, **kwargs)
        mesh: Any = next((p.device_mesh for p in self.parameters() if isinstance(p, DTensor) and p.is_meta), None)
        for key in () if mesh is None or _LOADING.get() else _eps_keys(state, kwargs.get("prefix", "")):
            local = state[key].to("meta")
            state[key] = DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return state

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        save_knee(destination, prefix, self.scheme.knee, self.scheme.sharpness)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Load as PyTorch does, with the weights' knee and sharpness if both have a knee and the metadata tell them.

        An eps of a norm without a knee is an error with `strict=False` (Trainer, PEFT) too.

        The config forgets its powers, which may belong to another calibration: the next save writes the weights' own.
        """
        metadata, *_, errors = args
        own = self.scheme.knee, self.scheme.sharpness
        if _eps_keys(state_dict, prefix) and (found := saved_knee(metadata, *own)) != own:
            self.scheme = dataclasses.replace(self.scheme, knee=found[0], sharpness=found[1])
            self.config.set_scheme(self.scheme)
        for key in _eps_keys(state_dict, prefix):
            self.config.qk_norm_powers = None
            if not self.scheme.knee:
                errors.append(
                    f"{key} is in the weights, and the norm has no knee. Load the checkpoint by from_pretrained, or "
                    "the adapter into the model that it was trained on"
                )
        load: Any = super()._load_from_state_dict
        load(state_dict, prefix, *args)


def save_knee(state: Any, prefix: str, knee: float, sharpness: int) -> None:
    """Write a module's knee and sharpness into a state dict's metadata, which `torch.save` keeps: ε tells neither."""
    metadata = getattr(state, "_metadata", {}).get(prefix[:-1])
    if metadata is not None and knee:
        metadata["knee"] = knee, sharpness


def saved_knee(metadata: Any, knee: float, sharpness: int) -> tuple[float, int]:
    """Knee and sharpness in a module's metadata; the present ones without, and for a module without a knee."""
    found: tuple[float, int] = metadata.get("knee", (knee, sharpness)) if knee else (knee, sharpness)
    return found


def _eps_keys(state: Any, prefix: str) -> list[str]:
    """The names of the ε of a layer's norms in a state dict; under PEFT also of their copies."""
    return [key for key in state if key.startswith(prefix) and key.endswith(".eps") and "_norm." in key]


def local_tensor(eps: Tensor) -> Tensor:
    """Return a knee's eps from a state dict as a plain tensor on its mesh's device type."""
    return eps.to_local().to(eps.device_mesh.device_type) if isinstance(eps, DTensor) else eps
