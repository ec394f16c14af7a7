"""Checkpoints converted to a scheme, measured again, described by a card, and pushed to the Hub."""
