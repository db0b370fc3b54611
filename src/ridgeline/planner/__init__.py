"""What a deployment can reach, needs and costs: roofline, cache, money, energy, and what was measured beside it."""
