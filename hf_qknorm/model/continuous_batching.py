"""The check before transformers' continuous batching, whose worker thread would hide an error."""

from __future__ import annotations

from transformers import PreTrainedModel

from hf_qknorm.model.attention import patched_layers


def check_continuous_batching(model: PreTrainedModel) -> None:
    """Raise ValueError for a patched encoder-decoder, and for a cap, which a paged cache would drop."""
    capped = next((layer.softcap for layer in patched_layers(model).values() if layer.softcap is not None), None)
    reason = None if capped is None else f"it drops the cap on the attention logits (softcap={capped:g})"
    if model.config.is_encoder_decoder:
        reason = "it runs no encoder for the decoder to attend to"
    if reason is not None:
        raise ValueError(
            f"continuous batching can't run {type(model).__name__}: {reason}. Call generate instead, with a batch of "
            "padded prompts"
        )
