"""A fuzz of the operators: the table of what each relies on, edits of its arguments, and the calls."""
