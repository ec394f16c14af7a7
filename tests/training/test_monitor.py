"""Statistics of the logits, watched from outside, against the oracle's."""

from __future__ import annotations

import pytest
import torch

from hf_qknorm import logit_statistics, patch_model
from hf_qknorm.attention import patched_layers
from hf_qknorm.families import FAMILIES
from hf_qknorm.testing import tiny_model


def tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids `[rows, length]` above the special ones."""
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padded", [False, True])
def test_statistics_equal_those_of_the_weights(family, padded):
    model = patch_model(tiny_model(family), "soft_cap", attn_implementation="eager")
    inputs = {"input_ids": tokens(2, 20)}
    if padded:
        inputs["attention_mask"] = torch.ones(2, 20, dtype=torch.long)
        inputs["attention_mask"][0, :6] = 0
    with torch.no_grad(), logit_statistics(model) as statistics:
        weights = model(**inputs, output_attentions=True).attentions
    assert list(statistics) == list(patched_layers(model))
    for layer, entry in zip(weights, statistics.values(), strict=True):
        rows = layer.sum(-1) > 0
        entropy = -torch.special.xlogy(layer, layer).sum(-1)
        expected = (entropy * rows).sum((0, 2)) / rows.sum((0, 2))
        torch.testing.assert_close(entry.entropy, expected, rtol=1e-4, atol=1e-5)
        assert (entry.max_logit > 0).all()


def test_backends_agree_and_passes_accumulate():
    model = patch_model(tiny_model("llama"), "qk_norm_cap")
    batches = [tokens(2, 20, seed) for seed in range(2)]
    seen = {}
    for backend in ("hf_qknorm", "eager"):
        model.set_attn_implementation(backend)
        with torch.no_grad(), logit_statistics(model) as statistics:
            for batch in batches:
                model(batch)
        seen[backend] = {name: (s.max_logit, s.entropy) for name, s in statistics.items()}
    for name, (largest, entropy) in seen["eager"].items():
        torch.testing.assert_close(seen["hf_qknorm"][name][0], largest, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(seen["hf_qknorm"][name][1], entropy, rtol=1e-4, atol=1e-5)
        assert (largest <= model.config.head_dim**0.5 + 1e-4).all()  # what norms with gain 1 bound it by


def test_watching_ends_and_changes_nothing():
    model = patch_model(tiny_model("llama"), "qk_norm_cap")
    batch = tokens(2, 20)
    plain = model(batch).logits
    with pytest.raises(RuntimeError, match="stop"), logit_statistics(model) as statistics:  # noqa: PT012
        assert torch.equal(model(batch).logits, plain)
        raise RuntimeError("stop")
    assert len(statistics) == 2
    assert all(layer.observer is None for layer in patched_layers(model).values())


def test_unpatched_models_are_refused():
    with (
        pytest.raises(ValueError, match='patch_model\\(model, "none"\\) makes it watchable'),
        logit_statistics(tiny_model("llama")),
    ):
        pass


def test_packed_sequences_are_watched_apart():
    model = patch_model(tiny_model("llama", initializer_range=0.2), "qk_norm_cap")
    rows = tokens(2, 10)
    places = torch.arange(10).repeat(2)[None]
    ends = torch.tensor([0, 10, 20], dtype=torch.int32)
    with torch.no_grad(), logit_statistics(model) as apart:
        model(rows, use_cache=False)
    with torch.no_grad(), logit_statistics(model) as packed:
        # a mask of ones keeps transformers from reading the packing off the positions
        model(rows.view(1, -1), torch.ones(1, 20), position_ids=places, cu_seq_lens_q=ends, use_cache=False)
    for name, entry in apart.items():
        torch.testing.assert_close(packed[name].max_logit, entry.max_logit, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(packed[name].entropy, entry.entropy, rtol=1e-5, atol=1e-6)
