"""The KV cache: block accounting (pure Python), memory of the pages, prefix index."""
