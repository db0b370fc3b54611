"""The operations as Triton kernels, for NVIDIA GPUs; the interpreter runs them on a CPU for the tests."""

import os

# Triton 3.9 warns that its default changes. Without fusion, sums of products are rounded twice and results change.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
