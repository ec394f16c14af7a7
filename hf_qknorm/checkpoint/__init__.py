"""Checkpoints on the disk: opened, checked (see README.md), rewritten by shard, and written to safe destinations."""
