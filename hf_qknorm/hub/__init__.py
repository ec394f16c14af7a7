"""Checkpoints and the Hub."""
