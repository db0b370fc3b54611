"""Size of the KV cache (formula of `core.spec`) with redesigned attention, what each change saves, and sequences that fit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ridgeline.core.sharing import share_in_groups
from ridgeline.core.spec import KV_FORMATS, KvFormat, LayerSpec, ModelSpec, Rope


@dataclass(frozen=True, slots=True)
class Cache:
    """The cache of a model. `spec` says heads, windows and sharing of its layers."""

    spec: ModelSpec
    format: KvFormat
    latent: int = 0
    """Elements of the latent vector of multi-head latent attention (MLA, DeepSeek-V2) that replaces the keys and values of a token
    and layer, with its RoPE part. 0: keys and values are cached."""

    def _layer_bytes(self, layer: LayerSpec) -> int:
        """Bytes of one token in one layer."""
        if not self.latent or layer.share_from is not None:
            return layer.kv_bytes(self.format)
        return self.format.vector_bytes(self.latent)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers, without sliding windows."""
        return sum(self._layer_bytes(layer) for layer in self.spec.layers)

    def sequence_bytes(self, tokens: int) -> int:
        """Bytes of a sequence. A layer with a window keeps at most `window` tokens."""
        return sum(self._layer_bytes(layer) * min(tokens, layer.window or tokens) for layer in self.spec.layers)


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


@dataclass(frozen=True, slots=True)
class Saving:
    """One change of the attention of a model, and the cache of a sequence after it."""

    name: str
    """heads, windows, sharing or format."""
    text: str
    factor: float
    """The bytes before are so many times the bytes after."""
    sequence_bytes: int


def cache_of(spec: ModelSpec, dtype: str | None = None, latent: int = 0) -> Cache:
    """The cache of a model. dtype: name in KV_FORMATS; None: that of the spec."""
    return Cache(spec, KV_FORMATS[dtype] if dtype else spec.kv, latent)


def kv_need(cache: Cache, batch: int, tokens: int) -> KvNeed:
    """Size of the cache of `batch` sequences with `tokens` tokens."""
    sequence_bytes, spec = cache.sequence_bytes(tokens), cache.spec
    common_bytes = 2 * batch * tokens * len(spec.layers) * spec.d_model * cache.format.bits // 8
    return KvNeed(batch, tokens, cache.token_bytes, sequence_bytes, batch * sequence_bytes, common_bytes)


def sequences(cache: Cache, tokens: int, memory_bytes: float) -> int:
    """Number of sequences of `tokens` tokens that fit into memory together with the weights."""
    return max(0, int((memory_bytes - cache.spec.weight_bytes) // cache.sequence_bytes(tokens)))


def savings(cache: Cache, tokens: int, kv_heads: int | None = None) -> tuple[int, list[Saving]]:
    """What each change saves, one after the other, in sequences of `tokens` tokens. The product of the factors is the saving.

    Args:
        kv_heads: key-value heads of the cache to compare with; None: as many as query heads (multi-head attention).
    Returns:
        Bytes of a sequence in the cache to compare with, which has no windows and no sharing and is in the model's dtype, and the
        changes that make a difference.
    """
    spec = cache.spec
    heads = [replace(layer, window=None, share_from=None) for layer in spec.layers]
    before = [replace(layer, n_kv_heads=kv_heads or layer.n_heads) for layer in heads]
    windows = [replace(layer, share_from=None) for layer in spec.layers]
    dtype = KV_FORMATS[spec.dtype]
    base = Cache(_with_layers(spec, before), dtype).sequence_bytes(tokens)
    steps = (
        ("heads", _heads_text(cache, before), Cache(_with_layers(spec, heads), dtype, cache.latent)),
        ("windows", _windows_text(spec), Cache(_with_layers(spec, windows), dtype, cache.latent)),
        ("sharing", _sharing_text(spec), Cache(spec, dtype, cache.latent)),
        ("format", f"{cache.format.name} instead of {dtype.name}", cache),
    )
    made, last = [], base
    for name, text, step in steps:
        size = step.sequence_bytes(tokens)
        if size != last:
            made.append(Saving(name, text, last / size, size))
        last = size
    return base, made


def _heads_text(cache: Cache, before: list[LayerSpec]) -> str:
    old = _range(layer.n_kv_heads for layer in before)
    if cache.latent:
        return f"latents of {cache.latent:,} elements instead of {old} key-value heads"
    new = _range(layer.n_kv_heads for layer in cache.spec.layers)
    return f"{new} key-value {'head' if new == '1' else 'heads'} instead of {old}"


def _windows_text(spec: ModelSpec) -> str:
    windows = [layer.window for layer in spec.layers if layer.window is not None]
    sizes = _range(windows) if windows else "none"
    return f"windows of {sizes} tokens in {len(windows)} of {len(spec.layers)} layers"


def _sharing_text(spec: ModelSpec) -> str:
    stored = sum(layer.share_from is None for layer in spec.layers)
    return f"{stored} caches for {len(spec.layers)} layers"


def _range(numbers: Iterable[int]) -> str:
    """Format as "8" or "4 to 8"."""
    values = sorted(set(numbers))
    return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"


def with_windows(spec: ModelSpec, window: int, global_every: int = 0) -> ModelSpec:
    """The model with a window of `window` tokens in all layers but one of `global_every` (0: in all)."""
    layers = [
        replace(layer, window=None if global_every and index % global_every == 0 else window)
        for index, layer in enumerate(spec.layers)
    ]
    return _with_layers(spec, layers)


def with_sharing(spec: ModelSpec, size: int) -> ModelSpec:
    """The model with one cache for `size` layers of the same kind that follow each other: those with a window among themselves, and
    the global ones among themselves."""
    return _with_layers(spec, share_in_groups(spec.layers, size))


def _with_layers(spec: ModelSpec, layers: Iterable[LayerSpec]) -> ModelSpec:
    return replace(spec, layers=tuple(layers))


def uniform(layers: int, heads: int, head_dim: int, *, kv_heads: int | None = None) -> ModelSpec:
    """Spec with attention layers only, for computing cache sizes. It has no MLP and no vocabulary."""
    layer = LayerSpec(heads, kv_heads or heads, head_dim, 0, Rope(dim=head_dim))
    return ModelSpec("(attention alone)", 0, heads * head_dim, (layer,) * layers, 1 << 30)
