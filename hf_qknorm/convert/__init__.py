"""Checkpoints converted to a scheme, exported, described by a card, and pushed to the Hub."""
