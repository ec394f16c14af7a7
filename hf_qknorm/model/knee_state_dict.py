"""The knees' ε in a patched layer's state dict."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

_LOADING = ContextVar("transformers is loading a checkpoint", default=False)


@contextmanager
def loading() -> Iterator[None]:
    """Mark that transformers is loading a checkpoint into a model."""
    token = _LOADING.set(True)
    try:
        yield
    finally:
        _LOADING.reset(token)


class KneeStateDict(nn.Module):
    """A mixin for layers whose norms may have a knee: adapts state dicts to FSDP, and checks loaded ones."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return PyTorch's state dict. In a sharded layer on the meta device, a knee's eps is a replicated DTensor.

        accelerate's `fsdp_cpu_ram_efficient_loading` reads the mesh of each tensor, to send it there from rank 0.
        While transformers loads a checkpoint, eps stays a plain tensor: it would shard a DTensor along an axis.
        """
        state = super().state_dict(*args, **kwargs)
        if _LOADING.get():
            return state
        mesh: Any = next((p.device_mesh for p in self.parameters() if isinstance(p, DTensor)), None)
        for name, eps in self._knees().items():
            if mesh is not None and eps.is_meta:
                replicated = DTensor.from_local(eps, mesh, [Replicate()] * mesh.ndim, run_check=False)
                state[f"{kwargs.get('prefix', '')}{name}"] = replicated
        return state

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Load as PyTorch does. An eps of a norm without a knee is an error with `strict=False` (Trainer, PEFT) too."""
        *_, errors = args
        own = {f"{prefix}{name}" for name in self._knees()}
        for key in sorted(state_dict.keys() - own):
            norm, _, rest = key.removeprefix(prefix).partition(".")
            if key.startswith(prefix) and norm.endswith("_norm") and rest.rpartition(".")[2] == "eps":
                errors.append(
                    f"{key} is in the weights, and the norm has no knee. Load the checkpoint by from_pretrained, or "
                    "the adapter into the model that it was trained on"
                )
        load: Any = super()._load_from_state_dict
        load(state_dict, prefix, *args)

    def _knees(self) -> dict[str, Tensor]:
        return {name: buffer for name, buffer in self.named_buffers() if name.rpartition(".")[2] == "eps"}


def local_tensor(eps: Tensor) -> Tensor:
    """Return a knee's eps from a state dict as a plain tensor on its mesh's device type."""
    return eps.to_local().to(eps.device_mesh.device_type) if isinstance(eps, DTensor) else eps
