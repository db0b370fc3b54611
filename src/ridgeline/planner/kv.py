"""Size of the KV cache (formula of `core.spec`), and number of sequences that fit on a device."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeline.core.spec import LayerSpec, ModelSpec, Rope


@dataclass(frozen=True, slots=True)
class KvNeed:
    """Bytes of the KV cache of `batch` sequences with `tokens` tokens each."""

    batch: int
    tokens: int
    token_bytes: int
    """Bytes of one token in all layers, without sliding windows."""
    sequence_bytes: int
    """Bytes of one sequence, with sliding windows."""
    total_bytes: int
    """Bytes of the batch."""
    common_bytes: int
    """Rule of thumb: 2 * batch * tokens * layers * width * element bytes. Exact only for multi-head attention without windows."""

    @property
    def saving(self) -> float:
        """common_bytes / total_bytes."""
        return self.common_bytes / self.total_bytes


def kv_need(spec: ModelSpec, batch: int, tokens: int, dtype: str | None = None) -> KvNeed:
    """Size of the cache of `batch` sequences with `tokens` tokens. dtype: name in KV_FORMATS; None: that of the spec."""
    spec = replace(spec, kv_format=dtype or spec.kv_format)
    sequence_bytes = spec.kv_bytes(tokens)
    common_bytes = 2 * batch * tokens * len(spec.layers) * spec.d_model * spec.kv.bits // 8
    return KvNeed(batch, tokens, spec.kv_bytes_per_token(), sequence_bytes, batch * sequence_bytes, common_bytes)


def sequences(spec: ModelSpec, tokens: int, memory_bytes: float, dtype: str | None = None) -> int:
    """Number of sequences of `tokens` tokens that fit into memory together with the weights."""
    sequence_bytes = replace(spec, kv_format=dtype or spec.kv_format).kv_bytes(tokens)
    return max(0, int((memory_bytes - spec.weight_bytes) // sequence_bytes))


def uniform(layers: int, heads: int, head_dim: int, *, kv_heads: int | None = None) -> ModelSpec:
    """Spec with attention layers only, for computing cache sizes. It has no MLP and no vocabulary."""
    layer = LayerSpec(heads, kv_heads or heads, head_dim, 0, Rope(dim=head_dim))
    return ModelSpec("(attention alone)", 0, heads * head_dim, (layer,) * layers, 1 << 30)
