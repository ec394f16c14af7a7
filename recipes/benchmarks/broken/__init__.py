"""Broken checkpoints: what breaks them, what runs over them, and what each outcome means."""
