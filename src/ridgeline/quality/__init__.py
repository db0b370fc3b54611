"""Compare two models: perplexity, divergence per token, task accuracy, and a verdict against limits."""
