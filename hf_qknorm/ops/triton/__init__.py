"""The fused kernels, in Triton: loaded when first used, never by importing `hf_qknorm`."""
