"""Broken checkpoints: the edits that break them, the commands that run on them, and the verdicts on the outcomes."""
