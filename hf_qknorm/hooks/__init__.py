"""Every change of the package to another library: one table of hooks, installed at `import hf_qknorm`."""
