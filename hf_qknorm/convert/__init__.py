"""Conversion of checkpoints to a scheme, and measurements of converted ones."""
