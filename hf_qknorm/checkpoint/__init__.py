"""Checkpoints on the disk: opened, checked (see README.md), loaded, rewritten by shard, and written to safe places."""
