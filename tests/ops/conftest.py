"""Here so that this folder is on the path: tests in folders below draw their problems from `tiled_cases` too."""
