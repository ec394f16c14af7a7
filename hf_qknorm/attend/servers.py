"""vLLM, a server with an attention of its own: settings that it would ignore are refused.

It takes settings from the config, not from a layer's call. `attn` of the layer, or `attention_instances` in the call,
holds the settings that it applies (vLLM 0.32).
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

SERVER_BACKENDS: Final = ("vllm", "vllm_mla")
_UNKNOWN: Final = object()


def for_server(layer: Any, q: Tensor, options: dict[str, Any]) -> Tensor:
    """Return a patched layer's queries for vLLM's attention, in which they carry the scheme's scale.

    Raises ValueError as `check_settings`.
    """
    if layer.scheme.scale is not None and not layer.family.style.prescaled:  # vLLM's scale is the model's own
        q, options["scaling"] = q * (layer.logit_scale / layer.own_scale), layer.own_scale
    check_settings(layer, options)
    return q


def check_settings(layer: Any, options: dict[str, Any]) -> None:
    """Raise ValueError if vLLM would apply another cap, window or scale than a layer's `options` ask for, or no sinks.

    Versions with `attention_instances` take the scale of the call.
    """
    own = _own(layer, options)
    impl = getattr(own, "impl", None)
    in_call = "attention_instances" in options
    wanted = {
        "sinks": (options.get("s_aux") is not None, getattr(own, "has_sink", False)),
        "cap": (layer.softcap, getattr(impl, "logits_soft_cap", _UNKNOWN) or None),
        "window": (layer.window, getattr(own, "sliding_window", _UNKNOWN)),
        "scale": (options["scaling"], options["scaling"] if in_call else getattr(impl, "scale", _UNKNOWN)),
    }
    for setting, (value, got) in wanted.items():
        if value != got and not (got is _UNKNOWN and not value):
            missing = "an unknown one" if got is _UNKNOWN else got or "none"
            raise ValueError(
                f"vLLM can't serve this checkpoint: layer {layer.layer_idx} has the {setting} {value or 'none'}, and "
                f"vLLM would apply {missing}. Serve it by transformers, or export it (hf-qknorm export)"
            )


def check_heads(layer: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> None:
    """Raise ValueError if vLLM's processes divide a layer's heads, but not its projections or gains.

    Queries, keys and values are `[B, H, T, D]`, in front of the norms.
    """
    heads, problem = q.shape[1], None
    served = getattr(_own(layer, options), "num_heads", heads)
    if served != heads:
        problem = f"{heads} heads in each, and vLLM would attend with {served}: its projections are not sharded"
    for name, x in (("q_norm", q), ("k_norm", k), ("v_norm", v)):
        gain = getattr(layer._modules.get(name), "weight", None)
        if gain is not None and gain.dim() == 2 and len(gain) != x.shape[1]:
            problem = f"{x.shape[1]} heads in each, and {name} has gains for {len(gain)}: gains by head are not sharded"
    if problem is not None:
        raise ValueError(
            f"vLLM can't divide this checkpoint among processes: layer {layer.layer_idx} computes {problem}. Serve it "
            "with a tensor parallel size of 1"
        )


def _own(layer: Any, options: dict[str, Any]) -> Any:
    """vLLM's attention of a layer, or None."""
    instances = options.get("attention_instances")
    return layer._modules.get("attn") if instances is None else instances[layer.layer_idx]
