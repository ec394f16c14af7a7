"""Reports as data, from and to JSON, and as text."""
