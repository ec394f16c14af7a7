"""Watching and steering the training of patched models."""
