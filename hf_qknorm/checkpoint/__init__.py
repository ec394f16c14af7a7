"""Checkpoints on the disk: where one comes from, whether it is whole, and where the next one goes."""
