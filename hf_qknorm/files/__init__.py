"""Files: written whole or not at all, read within limits, and their names in a checkpoint."""
