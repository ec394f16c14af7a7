"""The knees in a patched layer's state dict."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

_LOADING = ContextVar("transformers loads a checkpoint", default=False)


@contextmanager
def loading() -> Iterator[None]:
    """While transformers loads a checkpoint into a model."""
    token = _LOADING.set(True)
    try:
        yield
    finally:
        _LOADING.reset(token)


class KneeStateDict(nn.Module):
    """Mixed into a layer whose norms may have a knee: its state dict fits other tools, and its norms, or is refused."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """PyTorch's own. Of a sharded layer without memory a knee's eps is a DTensor, as the layer's parameters are.

        accelerate's `fsdp_cpu_ram_efficient_loading` asks each tensor for its mesh, to send it there from rank 0;
        transformers, while it loads a checkpoint, takes a DTensor for one that has an axis to be sharded.
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
        """PyTorch's own; also with `strict=False`, as Trainer and PEFT have it, a knee that no norm has is an error."""
        *_, errors = args
        own = {f"{prefix}{name}" for name in self._knees()}
        for key in sorted(state_dict.keys() - own):
            norm, _, rest = key.removeprefix(prefix).partition(".")
            if key.startswith(prefix) and norm.endswith("_norm") and rest.rpartition(".")[2] == "eps":
                errors.append(
                    f"{key} is there, and the norm has no knee. Load the checkpoint by from_pretrained, or the adapter "
                    "into the model that it was trained on"
                )
        load: Any = super()._load_from_state_dict
        load(state_dict, prefix, *args)

    def _knees(self) -> dict[str, Tensor]:
        return {name: buffer for name, buffer in self.named_buffers() if name.rpartition(".")[2] == "eps"}


def plain(eps: Tensor) -> Tensor:
    """A knee's eps out of a state dict, where the layer computes."""
    return eps.to_local().to(eps.device_mesh.device_type) if isinstance(eps, DTensor) else eps
