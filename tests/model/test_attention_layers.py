"""A patched layer against the scheme, written out with the oracle: project, norm, rotate, attend, join."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_qknorm import Scheme, patch_model
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.norms import NORM_FIELDS
from hf_qknorm.ops.reference import attention, head_norm
from qknorm_tests.covering import covering
from qknorm_tests.tables import (
    KNEES,
    MODEL_TYPES,
    PAIRS,
    TRIED,
    applies,
    assert_near,
    make_batch,
    randomise,
    real,
    sharp_model,
)

OTHERS = {
    "per head": Scheme(q="rms", k="layer", v="l2", gain="per_head", bias=True, eps=1e-3, scale=0.3, softcap=3.0),
    "no gain": Scheme(q="l2", k="l2", gain="none", scale=8.0),
    "keys alone": Scheme(k="lp", p=4.0, gain="scalar", softcap=2.0),
    "others with a knee": Scheme(q="l2", k="lp", v="layer", p=3.0, gain="per_head", scale=4.0),
    "no pre-norm": Scheme(q="rms", k="rms", v="rms", pre_norm=False, bias=True, softcap=1.0),
}
MODELS = [*PAIRS, *KNEES, *covering(MODEL_TYPES, OTHERS, fits=lambda t, name: applies(t, OTHERS[name]), strength=1)]
BACKENDS = ("hf_qknorm", "hf_qknorm_eager", "eager")


def written_out(layer: Any, scheme: Scheme, arguments: dict[str, Any], seen: Tensor) -> Tensor:
    """The output of an attention layer under `scheme`; `seen` `[B, 1, T, T]` is the mask."""
    style, config = layer.family.style, layer.config
    projected = style.project(layer, arguments["hidden_states"])
    heads = []
    for (name, field), x in zip(NORM_FIELDS.items(), projected, strict=False):
        norm = getattr(scheme, field)
        if norm is not None:
            own = getattr(layer, name)
            x = head_norm(x, norm, own.weight, own.bias, scheme.eps, scheme.p, own.knee)
        elif layer.family.own_norms and field != "v":
            x = getattr(layer, name)(x)
        heads.append(x.transpose(1, 2))
    q, k, v = heads
    if arguments.get("position_embeddings") is not None:
        q, k = layer.modelling.apply_rotary_pos_emb(q, k, *arguments["position_embeddings"])
    cap = scheme.softcap or (config.attn_logit_softcapping if layer.family.own_cap else None)
    scale = layer.head_dim**-0.5 if scheme.scale is None and hasattr(layer, "head_dim") else scheme.scale
    return style.output(layer, attention(q, k, v, scale=scale, softcap=cap, mask=seen).out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("model_type", "name"), MODELS)
@torch.no_grad()
def test_a_layer_computes_the_scheme(model_type, name):
    scheme = {**TRIED, **OTHERS}[name]
    model = randomise(patch_model(sharp_model(model_type), scheme), knee=0.5 if "knee" in name else 0.0)
    batch = make_batch("left", labels=False)
    calls: list[tuple[nn.Module, dict[str, Any], Tensor]] = []

    def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        calls.append((layer, {**kwargs, "hidden_states": hidden}, output[0]))

    for layer in patched_layers(model).values():
        layer.register_forward_hook(record, with_kwargs=True)
    for backend in BACKENDS:
        if scheme.softcap is None and backend != "eager":
            continue
        calls.clear()
        model.set_attn_implementation(backend)
        model(**batch)
        assert len(calls) == 2
        for layer, arguments, output in calls:
            length = output.shape[1]
            distance = torch.arange(length)[:, None] - torch.arange(length)
            seen = (distance >= 0) & (distance < (layer.window or length)) & real(batch)[:, None, None]
            expected = written_out(layer, scheme.resolve(), arguments, seen)
            assert_near(output[real(batch)], expected[real(batch)], 1e-5, backend)


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["none", "qk_norm_cap"])
def test_a_layer_takes_positional_arguments_in_the_order_of_its_own_forward(scheme):
    model = patch_model(sharp_model("llama"), scheme)
    layer = next(iter(patched_layers(model).values()))
    hidden, places = torch.randn(1, 5, model.config.hidden_size), torch.arange(5)[None]
    angles = model.model.rotary_emb(hidden, places)
    by_name = layer(hidden_states=hidden, position_embeddings=angles, attention_mask=None)[0]
    assert torch.equal(layer(hidden, angles, None)[0], by_name)
