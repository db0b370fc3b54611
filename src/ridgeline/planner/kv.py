"""How large a key-value cache is, by the formula of `core.spec`, and how many sequences a device holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeline.core.spec import LayerSpec, ModelSpec, Rope


@dataclass(frozen=True, slots=True)
class KvNeed:
    """The cache of `batch` sequences of `tokens` tokens, in bytes.

    token_bytes: what one token leaves in all layers, windows not applied. sequence_bytes: alive of one sequence, windows
    applied. total_bytes: of the batch. common_bytes: by the rule 2 x batch x tokens x layers x width x element bytes,
    which holds only where all heads have keys and values of their own, fill the width and see the whole past.
    """

    batch: int
    tokens: int
    token_bytes: int
    sequence_bytes: int
    total_bytes: int
    common_bytes: int

    @property
    def saving(self) -> float:
        """How many times less than the common rule says."""
        return self.common_bytes / self.total_bytes


def kv_need(spec: ModelSpec, batch: int, tokens: int, dtype: str | None = None) -> KvNeed:
    """The cache of `batch` sequences of `tokens` tokens in `dtype`, a name of KV_FORMATS (None: the spec's)."""
    spec = replace(spec, kv_format=dtype or spec.kv_format)
    one = spec.kv_bytes(tokens)
    common = 2 * batch * tokens * len(spec.layers) * spec.d_model * spec.kv.bits // 8
    return KvNeed(batch, tokens, spec.kv_bytes_per_token(), one, batch * one, common)


def sequences(spec: ModelSpec, tokens: int, memory_bytes: float, dtype: str | None = None) -> int:
    """Sequences of `tokens` tokens whose cache fits beside the weights, when nothing else needs memory."""
    one = replace(spec, kv_format=dtype or spec.kv_format).kv_bytes(tokens)
    return max(0, int((memory_bytes - spec.weight_bytes) // one))


def uniform(layers: int, heads: int, head_dim: int, *, kv_heads: int | None = None) -> ModelSpec:
    """A model of equal layers known only by its attention, its heads filling its width; feed-forward and vocabulary are
    left out, so that only its cache may be asked for."""
    one = LayerSpec(heads, kv_heads or heads, head_dim, 0, Rope(dim=head_dim))
    return ModelSpec("(attention alone)", 0, heads * head_dim, (one,) * layers, 1 << 30)
