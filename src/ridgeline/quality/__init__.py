"""What a change does to a model's answers: perplexity, drift token by token, and a verdict against limits."""
