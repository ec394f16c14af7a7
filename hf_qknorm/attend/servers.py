"""Servers with an attention of their own, vLLM and SGLang: settings that theirs would ignore are refused.

They take settings from the config, not from a layer's call. `attn` of the layer, or `attention_instances` in the call,
holds the settings that they apply (vLLM 0.32, and SGLang's source).
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

SERVER_BACKENDS: Final = ("vllm", "vllm_mla", "sglang")
_UNKNOWN: Final = object()


def for_server(layer: Any, q: Tensor, options: dict[str, Any]) -> Tensor:
    """Return a patched layer's queries for a server's attention, in which they carry the scheme's scale.

    Raises ValueError if the server would apply another cap, window or scale than `options` ask for, or no sinks or
    position bias, or would attend with a part of the heads.
    """
    server = layer.config._attn_implementation
    if layer.scheme.scale is not None and not layer.family.style.prescaled:  # vLLM's scale is the model's own
        q, options["scaling"] = q * (layer.logit_scale / layer.own_scale), layer.own_scale
    instances = options.get("attention_instances")
    own = layer._modules.get("attn") if instances is None else instances[layer.layer_idx]
    _check_heads(server, layer, q.shape[1], own)
    applied = _sglang(own, options) if server == "sglang" else _vllm(own, options)
    wanted: dict[str, Any] = {
        "sinks": options.get("s_aux") is not None,
        "position bias": options.get("position_bias") is not None,
        "cap": layer.softcap,
        "window": layer.window,
        "scale": options["scaling"],
    }
    for setting, value in wanted.items():
        got = applied.get(setting, False)
        if value != got and not (got is _UNKNOWN and not value):
            missing = "an unknown one" if got is _UNKNOWN else got or "none"
            raise ValueError(
                f"{server} can't serve this checkpoint: layer {layer.layer_idx} has the {setting} {value or 'none'}, "
                f"and {server} would apply {missing}. Serve it by transformers, or export it (hf-qknorm export)"
            )
    return q


def _check_heads(server: str, layer: Any, heads: int, own: Any) -> None:
    """Raise ValueError if the processes of a server divide the heads that each of them computes."""
    served = getattr(own, "tp_q_head_num" if server == "sglang" else "num_heads", heads)
    if served != heads:
        raise ValueError(
            f"{server} can't divide this checkpoint among processes: layer {layer.layer_idx} computes {heads} heads in "
            f"each, and {server} would attend with {served}, since the projections of this model type are not sharded. "
            "Serve it with a tensor parallel size of 1"
        )


def _vllm(own: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The settings that vLLM's `Attention` applies. Versions with `attention_instances` take the scale of the call."""
    impl = getattr(own, "impl", None)
    cap = getattr(impl, "logits_soft_cap", _UNKNOWN)
    in_call = "attention_instances" in options
    return {
        "cap": cap or None,
        "window": getattr(own, "sliding_window", _UNKNOWN),
        "scale": options["scaling"] if in_call else getattr(impl, "scale", _UNKNOWN),
        "sinks": getattr(own, "has_sink", False),
    }


def _sglang(own: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The settings that SGLang's `RadixAttention` applies. Its window does not count the token itself."""
    cap, window = (getattr(own, name, _UNKNOWN) for name in ("logit_cap", "sliding_window_size"))
    if isinstance(window, int):
        window = None if window < 0 else window + 1
    return {"cap": cap or None, "window": window, "scale": options["scaling"]}
