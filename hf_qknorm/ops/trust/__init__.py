"""Trust at first use: the kernels are checked against the specification when a process first calls them."""
