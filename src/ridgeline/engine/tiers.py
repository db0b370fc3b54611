"""Start-up of the tiers below the KV cache: what their options mean, what does not hold, and how fast copies are."""

from __future__ import annotations

from pathlib import Path

from ridgeline.core.config import EngineConfig
from ridgeline.core.cost import CostModel, step_work
from ridgeline.core.errors import ConfigError
from ridgeline.core.sizing import GIB
from ridgeline.core.spec import KvLayout
from ridgeline.hardware.probe import host_memory
from ridgeline.kv.copies import TierTransfers
from ridgeline.kv.disk import Disk
from ridgeline.kv.offload import Offload, Pays
from ridgeline.kv.prefix import Source
from ridgeline.kv.store import KvStore, Transfers

DISK_BYTES_PER_S = 1e9
"""Assumed rate of reading files. What was written lately is in the system's page cache and faster."""


def check_tiers(config: EngineConfig, layout: KvLayout) -> None:
    """Refuse options of the tiers that do not hold. Raises ConfigError that names the option and the remedy."""
    for name in ("kv_offload_gb", "kv_disk_gb", "kv_offload_ttl"):
        if getattr(config, name) < 0:
            raise _refused(config, name, "give 0 or more")
    if config.kv_disk and not config.kv_offload_gb:
        raise _refused(config, "kv_disk", "blocks reach files through host memory: add --kv-offload-gb")
    if config.kv_disk and config.kv_disk_gb * GIB < layout.page_bytes:
        raise _refused(config, "kv_disk_gb", f"a block has {layout.page_bytes:,} bytes: give more")
    if not config.kv_offload_gb:
        return
    if not config.enable_prefix_caching:
        raise _refused(
            config, "kv_offload_gb", "it keeps blocks of the prefix cache: leave out --no-enable-prefix-caching"
        )
    if config.ranks > 1:
        raise _refused(config, "kv_offload_gb", "several ranks have no tiers: leave it out, or use one process")
    if (size := config.kv_offload_gb * GIB) < layout.page_bytes:
        raise _refused(config, "kv_offload_gb", f"a block has {layout.page_bytes:,} bytes: give more")
    if size > (free := host_memory()[1]):
        raise _refused(config, "kv_offload_gb", f"{free / GIB:.1f} GiB of host memory are free: give less")


def open_tiers(
    config: EngineConfig, layout: KvLayout, store: KvStore, fingerprint: str, cost: CostModel
) -> tuple[Source, Transfers]:
    """What the scheduler asks and what the runner copies with; without the options both have nothing below the cache."""
    if not config.kv_offload_gb:
        return Source(), Transfers(store)
    slots, ttl_s = int(config.kv_offload_gb * GIB) // layout.page_bytes, config.kv_offload_ttl
    disk = None
    if config.kv_disk:
        capacity = int(config.kv_disk_gb * GIB)
        disk = Disk(Path(config.kv_disk), capacity, bytes.fromhex(fingerprint), layout.page_bytes, ttl_s=ttl_s)
    transfers = TierTransfers(store, slots, disk)
    pays = copy_pays(cost, layout.page_bytes, transfers.measure())
    return Offload(layout, slots, pays, disk, ttl_s=ttl_s), transfers


def copy_pays(cost: CostModel, page_bytes: int, bytes_per_s: float) -> Pays:
    """A copy pays where it takes less time than the prompt step that computes the same tokens. bytes_per_s: from host memory."""

    def pays(start: int, end: int, in_memory: int, on_disk: int) -> bool:
        copied_s = page_bytes * (in_memory / bytes_per_s + on_disk / DISK_BYTES_PER_S)
        return copied_s < cost.step_s(step_work(cost.spec, [(start, end - start)], 0))

    return pays


def _refused(config: EngineConfig, name: str, reason: str) -> ConfigError:
    return ConfigError(f"--{name.replace('_', '-')} is {getattr(config, name)}: {reason}.", param=name)
