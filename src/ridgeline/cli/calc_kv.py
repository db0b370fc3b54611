"""`ridgeline calc kv`: size of the KV cache of a model or a shape, and what each change of its attention saves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.cli.calc_lines import Line, Option, count, flag, gb
from ridgeline.cli.flags import Arguments, whole_number
from ridgeline.cli.roofline import read_spec
from ridgeline.cli.serve import resolve_arguments
from ridgeline.cli.show import bytes_text
from ridgeline.core.errors import ConfigError
from ridgeline.core.plural import counted
from ridgeline.core.quantization import check_experts
from ridgeline.core.spec import KV_FORMATS, ModelSpec
from ridgeline.hardware.probe import resolve_accelerator
from ridgeline.hardware.serving import held_on
from ridgeline.planner.kv import (
    Cache,
    cache_of,
    kv_need,
    savings,
    sequences,
    uniform,
    with_sharing,
    with_windows,
)

_SHAPE = ("layers", "heads", "kv_heads", "head_dim")
OPTIONS: dict[str, Option] = {
    "batch": (whole_number, "number of sequences (default: 1)"),
    "tokens": (whole_number, "tokens per sequence (default: 2048)"),
    "cache_dtype": (str, f"dtype of the cache: {', '.join(KV_FORMATS)} (default: the model's)"),
    "window": (whole_number, "sliding window in tokens, in all layers or in those that --global-every leaves"),
    "global_every": (whole_number, "one layer in K without a window, as in 6 for 1 global layer and 5 local ones"),
    "share_layers": (whole_number, "neighbouring layers of one kind (local, global) that share one cache (default: 1)"),
    "latent": (
        whole_number,
        "elements that latent attention (MLA) caches per token and layer, with RoPE: 576 for DeepSeek-V3",
    ),
    "versus_kv_heads": (whole_number, "key-value heads of the cache to compare with (default: as many as query heads)"),
    "layers": (whole_number, "number of layers, instead of MODEL"),
    "heads": (whole_number, "number of query heads"),
    "kv_heads": (whole_number, "number of key-value heads (default: --heads; 1 for multi-query attention)"),
    "head_dim": (whole_number, "dimension of a head"),
}


def kv(args: Arguments, options: Mapping[str, Any]) -> list[Line]:
    """Size of the KV cache of a model or a shape, and what heads, windows, sharing and format save."""
    cache = _cache(_attention(args, options), options)
    need = kv_need(cache, count(options, "batch", 1), count(options, "tokens", 2048))
    sequence = f"one sequence of {counted(need.tokens, 'token')}"
    lines = [
        Line("token_bytes", "one token", need.token_bytes, bytes_text(need.token_bytes)),
        Line("sequence_bytes", sequence, need.sequence_bytes, gb(need.sequence_bytes)),
        Line("total_bytes", f"batch of {counted(need.batch, 'sequence')}", need.total_bytes, gb(need.total_bytes)),
        Line(
            "common_rule_bytes",
            "rule of thumb: 2 x batch x tokens x layers x width",
            need.common_bytes,
            gb(need.common_bytes),
        ),
        Line("times_less", "rule of thumb / batch", need.saving, f"{need.saving:.2f}"),
        *_product(cache, need.tokens, options),
    ]
    if "on" in options:
        accelerator = resolve_accelerator(options["on"])
        check_experts(cache.spec, accelerator.kind)
        cache = replace(cache, spec=held_on(cache.spec, accelerator.name, accelerator.kind))
        fit = sequences(cache, need.tokens, accelerator.memory_bytes)
        weights_note = "with the weights" if cache.spec.vocab_size else "without weights"
        lines.append(
            Line("sequences_that_fit", f"sequences that fit on {accelerator.name}, {weights_note}", fit, f"{fit:,}")
        )
    return lines


def _product(cache: Cache, tokens: int, options: Mapping[str, Any]) -> list[Line]:
    """One line for each change that makes the cache smaller or larger, and their product."""
    versus = count(options, "versus_kv_heads", None) if "versus_kv_heads" in options else None
    base, changes = savings(cache, tokens, versus)
    if not changes:
        return []
    compared = f"{versus} key-value heads" if versus else "a key-value head for each query head"
    label = f"to compare: {compared}, no windows, in {cache.spec.dtype}"
    lines = [Line("compared_bytes", label, base, bytes_text(base))]
    lines += [
        Line(
            f"times_less_{change.name}",
            change.text,
            change.factor,
            f"{change.factor:.2f} x less: {bytes_text(change.sequence_bytes)}",
        )
        for change in changes
    ]
    product = base / changes[-1].sequence_bytes
    factors = " x ".join(f"{change.factor:.2f}" for change in changes)
    return [
        *lines,
        Line(
            "times_less_product",
            "product",
            product,
            f"{factors} = {product:.1f} x less" if len(changes) > 1 else f"{factors} x less",
        ),
    ]


def _cache(spec: ModelSpec, options: Mapping[str, Any]) -> Cache:
    """The cache with the changes that the options name."""
    dtype = options.get("cache_dtype")
    if dtype is not None and dtype not in KV_FORMATS:
        raise ConfigError(
            f"--cache-dtype {dtype!r} is unknown: use one of {', '.join(KV_FORMATS)}.", param="cache_dtype"
        )
    n_layers = len(spec.layers)
    for name in ("global_every", "share_layers"):
        if name in options and count(options, name, None) > n_layers:
            raise ConfigError(
                f"{flag(name)} is {options[name]}: give at most {n_layers}, the number of layers.", param=name
            )
    every = count(options, "global_every", None) if "global_every" in options else 0
    if "window" in options:
        spec = with_windows(spec, count(options, "window", None), every)
    elif "global_every" in options:
        raise ConfigError("--global-every applies to layers with a window: give --window too.", param="global_every")
    latent = count(options, "latent", None) if "latent" in options else 0
    if latent and "kv_heads" in options:
        raise ConfigError("--latent replaces key-value heads: leave --kv-heads out.", param="kv_heads")
    return cache_of(with_sharing(spec, count(options, "share_layers", 1)), dtype, latent)


def _attention(args: Arguments, options: Mapping[str, Any]) -> ModelSpec:
    """Spec of MODEL, or of a model with the shape given by --layers, --heads and --head-dim."""
    shaped = [name for name in _SHAPE if name in options]
    if not shaped:
        return read_spec(resolve_arguments(args).model)
    if "model" in args.flags:
        raise ConfigError(f"MODEL and {flag(shaped[0])} are given: leave one of them out.", param="model")
    layers, heads, head_dim = (count(options, name, None) for name in ("layers", "heads", "head_dim"))
    kv_heads = count(options, "kv_heads", heads)
    if heads % kv_heads:
        raise ConfigError(f"--kv-heads {kv_heads} does not divide --heads {heads}: give a divisor.", param="kv_heads")
    return uniform(layers, heads, head_dim, kv_heads=kv_heads)
