"""Conversion of trained models and checkpoints to a scheme, with a calibration that keeps their predictions."""
