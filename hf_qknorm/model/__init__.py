"""A patched model: its attention, norms, config and classes, and the checks on loading one."""
