"""Tensors in, tensors out: nothing here imports transformers."""
