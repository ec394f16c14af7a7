"""Here so that this folder is on the path."""
