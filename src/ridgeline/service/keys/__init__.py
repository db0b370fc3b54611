"""API keys: who may send requests, how many, and what they have used."""
