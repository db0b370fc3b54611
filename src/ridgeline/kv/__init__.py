"""The KV cache: who holds which block (pure Python), where the bytes lie, what prefixes can be reused."""
