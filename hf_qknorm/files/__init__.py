"""Files: atomic writing, reading of untrusted data, paths, and the names of a checkpoint's files."""
