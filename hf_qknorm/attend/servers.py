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
    position bias.
    """
    server = layer.config._attn_implementation
    if layer.scheme.scale is not None and not layer.family.style.prescaled:  # vLLM's scale is the model's own
        q, options["scaling"] = q * (layer.logit_scale / layer.own_scale), layer.own_scale
    own = _own(layer, options)
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


def check_heads(layer: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> None:
    """Raise ValueError if a server's processes divide a layer's heads, but not its projections or gains.

    Queries, keys and values are `[B, H, T, D]`, in front of the norms.
    """
    server, heads, problem = layer.config._attn_implementation, q.shape[1], None
    served = getattr(_own(layer, options), "tp_q_head_num" if server == "sglang" else "num_heads", heads)
    if served != heads:
        problem = f"{heads} heads in each, and {server} would attend with {served}: its projections are not sharded"
    for name, x in (("q_norm", q), ("k_norm", k), ("v_norm", v)):
        gain = getattr(layer._modules.get(name), "weight", None)
        if gain is not None and gain.dim() == 2 and len(gain) != x.shape[1]:
            problem = f"{x.shape[1]} heads in each, and {name} has gains for {len(gain)}: gains by head are not sharded"
    if problem is not None:
        raise ValueError(
            f"{server} can't divide this checkpoint among processes: layer {layer.layer_idx} computes {problem}. Serve "
            "it with a tensor parallel size of 1"
        )


def _own(layer: Any, options: dict[str, Any]) -> Any:
    """The server's attention of a layer, or None."""
    instances = options.get("attention_instances")
    return layer._modules.get("attn") if instances is None else instances[layer.layer_idx]


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
