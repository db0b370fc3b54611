"""The operations as Triton kernels, for NVIDIA GPUs; the interpreter runs them on a CPU for the tests."""
