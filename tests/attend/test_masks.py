"""Masks as ranges of keys: the same rows as transformers' own mask, in linear memory; or that mask itself."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

from hf_qknorm import patch_model
from hf_qknorm.attend.calls import is_ranges, make_call
from hf_qknorm.attend.functions import REGISTERED
from hf_qknorm.attend.masks import CHUNK, structured_mask
from hf_qknorm.ops import reference
from hf_qknorm.ops.types import Heads
from qknorm_tests.covering import covering
from qknorm_tests.mask_cases import CREATE, PADDING, assert_ranges, config, create, even, padded, transformers_own
from qknorm_tests.memory import LargestStorage
from qknorm_tests.tables import BATCHES, LENGTH, dense, make_batch, sharp_model

POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5], [0, 0, 1, 2, 3, 4, 5, 0, 1]])


def visible_keys(mask: Tensor | None, expected: Tensor, causal: bool, window: int | None) -> Tensor:
    """Whether each query sees each key, `[B, 1, T, S]`, in a layer of this causality and window with the mask."""
    batch, _, queries, keys = expected.shape
    q, k = torch.zeros(batch, 1, queries, 1), torch.zeros(batch, 1, keys, 1)
    module: Any = SimpleNamespace(scheme="none", is_causal=causal, runs_own_forward=False)
    heads, seen, options = make_call(module, Heads(q, k, k), mask, sliding_window=window)
    kept = heads.k.shape[2]
    visible = reference.visible(queries, kept, options.causal, options.window).expand(batch, 1, -1, -1)
    if seen.ranges is not None:
        visible = visible & dense(seen.ranges, kept)
    visible = visible if seen.mask is None else visible & seen.mask
    return torch.nn.functional.pad(visible, (0, keys - kept))


@pytest.mark.parametrize(("kind", "padding", "window"), covering(CREATE, PADDING, [1, 4, 9, 20]))
def test_padded_batches_are_ranges_where_they_have_no_holes(kind, padding, window):
    given = padded(padding)
    expected = transformers_own(kind, config(kind, window), 9, given)
    mask = create(kind, config(kind, window), 9, given)
    if mask is None:
        assert padding in ("none", "full")
    elif padding == "holes":
        assert mask.dtype == torch.bool
    else:
        assert_ranges(mask, 2, 9, 9)
    causal = "bidirectional" not in kind
    assert torch.equal(visible_keys(mask, expected, causal, window if "window" in kind else None), expected)


@pytest.mark.parametrize(
    ("kind", "rows"), [("causal", POSITIONS), ("window", POSITIONS[:1]), ("chunked", POSITIONS + 5)], ids=str
)
def test_packed_positions_are_ranges(kind, rows):
    expected = transformers_own(kind, config(kind), 9, position_ids=rows)
    mask = create(kind, config(kind), 9, position_ids=rows)
    assert_ranges(mask, 2, 9, 9)
    assert torch.equal(dense(mask[:, 0], 9), expected)


STEPS = [(9, 1, 1, 1), (3, 3, 1, 1, 3), (1, 1, 1, 1, 1, 1), (2, 9)]


@pytest.mark.parametrize(
    ("steps", "kind", "padded", "static"),
    covering(STEPS, ["causal", "window", "chunked"], [False, True], [False, True]),
    ids=str,
)
def test_steps_into_a_cache_are_ranges(steps, kind, padded, static):
    settings = config(kind, num_key_value_heads=1, num_attention_heads=1, hidden_size=4)
    cache = StaticCache(settings, max_cache_len=16) if static else DynamicCache(config=settings)
    for number, length in enumerate(steps):
        given = torch.ones(2, sum(steps[: number + 1]), dtype=torch.long)
        given[0, :2] = 0
        given = given if padded else None
        expected = transformers_own(kind, settings, length, given, cache)
        mask = create(kind, settings, length, given, cache)
        if mask is not None:
            assert_ranges(mask, 2, length, expected.shape[3])
        seen = visible_keys(mask, expected, True, settings.sliding_window if kind == "window" else None)
        assert torch.equal(seen, expected)
        k = torch.zeros(2, 1, length, 4)
        assert cache.update(k, k, 0)[0].shape[2] == expected.shape[3]


def prefix(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """The tokens of an image, which all see each other."""
    return key < 4


def backwards(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key + query == 8


OWN = [
    ({"or_mask_function": prefix}, True),
    ({"and_mask_function": even}, False),
    ({"and_mask_function": lambda b, h, query, key: query != 2}, False),  # between rows that see the first key
    ({"and_mask_function": lambda b, h, query, key: (query >= 3) & (query < 7)}, True),
    ({"and_mask_function": backwards}, False),  # a key each, but starts that decrease
    ({"or_mask_function": backwards}, False),
    ({"block_sequence_ids": torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1, -1]] * 2)}, True),
    ({"block_sequence_ids": torch.tensor([[0, 0, -1, -1, -1, 0, 0, -1, -1]] * 2)}, False),
]


@pytest.mark.parametrize(
    ("own", "padding", "chunk"), covering(OWN, ["none", "left"], [1, 40, CHUNK]), ids=lambda x: str(x)[:40]
)
def test_functions_of_the_users_own_are_ranges_where_they_can_be(own, padding, chunk, monkeypatch):
    function, contiguous = own
    monkeypatch.setattr("hf_qknorm.attend.masks.CHUNK", chunk)
    given = padded(padding)
    expected = transformers_own("causal", config("causal"), 9, given, **function)
    mask = create("causal", config("causal"), 9, given, **function)
    assert is_ranges(mask) == contiguous
    if contiguous:
        assert_ranges(mask, 2, 9, 9)
        mask = dense(mask[:, 0], 9)
    assert torch.equal(mask, expected)


@pytest.mark.parametrize(
    ("kind", "given"),
    covering(
        ["causal", "window", "bidirectional", "bidirectional_window"], ["padding", "positions", "cache"], strength=1
    ),
)
def test_the_usual_masks_are_linear(kind, given):
    """No tensor has more than a few numbers a token: the closed forms match this version of transformers."""
    length, window = 4096, 100
    padding = torch.ones(2, length, dtype=torch.bool)
    padding[0, :7] = False
    arguments: dict[str, Any] = {"padding": padding}
    if given == "positions":
        arguments = {"position_ids": torch.arange(length).remainder(1000)[None]}
    elif given == "cache":
        settings = config(kind, num_key_value_heads=1, num_attention_heads=1, hidden_size=4)
        arguments["cache"] = StaticCache(settings, max_cache_len=2 * length)
    with LargestStorage() as largest:
        create(kind, config(kind, window), length, **arguments)
    assert largest.elements <= 8 * length


@pytest.mark.parametrize("function", [{"or_mask_function": prefix}, {"block_sequence_ids": -torch.ones(2, 4096)}])
def test_a_mask_without_a_closed_form_is_read_in_chunks(function):
    with LargestStorage() as largest:
        mask = create("causal", config("causal"), 4096, **function)
    assert_ranges(mask, 2, 4096, 4096)
    assert largest.elements <= CHUNK < 4096**2


def test_keys_may_be_fewer_than_those_of_the_mask():
    q, k, v = torch.randn(3, 1, 1, 5, 16, generator=torch.Generator().manual_seed(0))
    masks = [torch.tensor([0, 3, 2, stop], dtype=torch.int32).view(1, 1, 2, 2) for stop in (5, 8)]
    for name in ("hf_qknorm", "hf_qknorm_tiled", "hf_qknorm_eager"):
        assert torch.equal(*(REGISTERED[name](nn.Module(), q[:, :, :2], k, v, mask)[0] for mask in masks))


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize(
    ("name", "patched"), [("hf_qknorm", True), ("hf_qknorm_tiled", False), ("hf_qknorm_eager", True)]
)
def test_a_cache_that_checkpointing_takes_from_the_layers_is_an_error(name, patched):
    """Without its keys, the ranges would let each query see the tokens behind it."""
    model = sharp_model("llama")
    patch_model(model, "soft_cap", attn_implementation=name) if patched else model.set_attn_implementation(name)
    tokens = make_batch("plain", labels=False)["input_ids"]
    with torch.no_grad():
        cache = model(tokens[:, :5], use_cache=True).past_key_values
    model.train().gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=f"mask is for {LENGTH} keys, and a layer has {LENGTH - 5}"):
        model(tokens[:, 5:], past_key_values=cache)


def test_the_mask_is_none_where_causality_and_window_suffice():
    """Plain causal and windowed batches need no mask; padding and packed rows do."""
    masks: list[Tensor | None] = []
    model = patch_model(sharp_model("qwen2"), "soft_cap")  # one full layer, one with a window
    for layer in (layer.self_attn for layer in model.model.layers):
        layer.observers = (lambda module, q, k, v, mask, options: masks.append(mask),)
    for kind in BATCHES:
        masks.clear()
        model(**make_batch(kind))
        assert len(masks) == 2
        if kind == "plain":
            assert masks == [None, None]
        else:
            assert all(is_ranges(mask) and mask.shape == (2, 1, LENGTH, 2) for mask in masks)
            assert not torch.equal(*masks), "a padded window is in its mask"


def test_a_window_that_the_layers_do_not_pass_is_masked():
    arguments: dict[str, Any] = {"batch_size": 1, "q_length": 8, "kv_length": 8}
    arguments["config"] = patch_model(sharp_model("mistral"), "soft_cap").config
    assert structured_mask(**arguments, local_size=8) is None
    assert structured_mask(**arguments, local_size=3) is not None
    arguments["config"].attention_chunk_size = 8  # then the size is that of the chunks, which layers do not pass
    assert structured_mask(**arguments, local_size=8) is not None
    arguments["config"] = sharp_model("mistral").config  # of an unpatched model
    assert structured_mask(**arguments, local_size=8) is not None
    arguments["config"] = patch_model(sharp_model("llama", sliding_window=8), "soft_cap").config
    assert structured_mask(**arguments, local_size=8) is not None


@pytest.mark.parametrize(
    ("ends", "given", "causal", "window"),
    covering([(0, 4, 9, 13, 18), (0, 6, 12, 12, 18), (3, 11)], ["nothing", "ranges", "mask"], [True, False], [None, 3]),
    ids=str,
)
def test_ends_of_packed_sequences_are_ranges(ends, given, causal, window):
    """Sequences may continue in the next row of the batch, and tokens may be outside of all."""
    padding = torch.tensor(PADDING["both"]).bool()[:, None, None]
    padding = None if given == "nothing" else padding & reference.visible(9, 9, causal, window)
    mask = padding
    if given == "ranges":
        mask = create("causal", config("causal"), 9, torch.tensor(PADDING["both"]))
        padding, causal, window = dense(mask[:, 0], 9), False, None
    q = torch.zeros(2, 1, 9, 1)
    module: Any = SimpleNamespace(scheme="none", is_causal=causal, runs_own_forward=False)
    arguments = {"sliding_window": window, "cu_seq_lens_q": torch.tensor(ends, dtype=torch.int32)}
    _, seen, options = make_call(module, Heads(q, q, q), mask, **arguments)
    of = torch.tensor([sum(place >= end for end in ends) for place in range(18)]).view(2, 1, 9)
    expected = (of[..., :, None] == of[..., None, :]) & reference.visible(9, 9, causal, window)
    expected = expected if padding is None else expected & padding
    if given == "mask":
        assert torch.equal(seen.mask, expected)
    else:
        assert_ranges(seen.ranges[:, None], 2, 9, 9)
        assert (seen.mask, options.causal, options.window) == (None, False, None)
        assert torch.equal(dense(seen.ranges, 9), expected)
