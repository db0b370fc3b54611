"""Planning of a deployment: roofline, cost model calibration, KV cache, cost, energy, and diagnosis of a running server."""
