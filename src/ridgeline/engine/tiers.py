"""Start-up of the tiers below the KV cache: what their options mean, what does not hold, and how fast copies are."""

from __future__ import annotations

import time
from hashlib import sha256
from itertools import count, islice
from pathlib import Path

from ridgeline.core.config import EngineConfig
from ridgeline.core.cost import CostModel
from ridgeline.core.errors import ConfigError
from ridgeline.core.plan import StepPlan
from ridgeline.core.sizing import GIB
from ridgeline.core.spec import KvLayout
from ridgeline.engine.leases import Leases
from ridgeline.hardware.probe import host_memory
from ridgeline.kv.copies import TierTransfers
from ridgeline.kv.disk import Disk, check_folder
from ridgeline.kv.offload import CopyCost, Offload
from ridgeline.kv.prefix import Source
from ridgeline.kv.store import KvStore, Transfers

DISK_BYTES_PER_S = 1e9
"""Assumed rate of reading files. What was written lately is in the system's page cache and faster."""
KEEP_S = 6.0
"""Seconds in which an engine that ends writes the prefixes of its pool to files. The service kills it after 10."""


def check_tiers(config: EngineConfig, layout: KvLayout, weight_bytes: int = 0) -> None:
    """Refuse sizes and folders of the tiers that do not hold. Raises ConfigError that names the option and the remedy.

    weight_bytes: of weights that stay in host memory.
    """
    free = host_memory()[1]
    if weight_bytes > free:
        raise ConfigError(
            f"--cpu-offload-gb takes {weight_bytes / GIB:.4g} GiB of host memory, and {free / GIB:.4g} GiB are free: give less, or "
            "use --quantization.",
            param="cpu_offload_gb",
        )
    if config.kv_disk and not config.kv_offload_gb:
        raise _refused(config, "kv_disk", "blocks reach files through host memory: add --kv-offload-gb")
    if config.kv_disk:
        if config.kv_disk_gb * GIB < layout.page_bytes:
            raise _refused(config, "kv_disk_gb", f"a block has {layout.page_bytes:,} bytes: give more")
        check_folder(Path(config.kv_disk))
    if config.kv_offload_ttl and not config.kv_offload_gb:
        raise _refused(config, "kv_offload_ttl", "it is the lifetime of blocks below the cache: add --kv-offload-gb")
    if not config.kv_offload_gb:
        return
    if (size := config.kv_offload_gb * GIB) < layout.page_bytes:
        raise _refused(config, "kv_offload_gb", f"a block has {layout.page_bytes:,} bytes: give more")
    if size > (free - weight_bytes):
        raise _refused(
            config, "kv_offload_gb", f"{(free - weight_bytes) / GIB:.1f} GiB of host memory are free: give less"
        )


def open_tiers(
    config: EngineConfig, layout: KvLayout, store: KvStore, fingerprint: str, cost: CostModel
) -> tuple[Source, Transfers]:
    """What the scheduler asks and what the runner copies with; without the options both have nothing below the cache.

    Args:
        fingerprint: of all that determines the bytes of a page, the operations that compute them included.
    """
    if not config.kv_offload_gb:
        return Source(), Transfers(store)
    slots, ttl_s = int(config.kv_offload_gb * GIB) // layout.page_bytes, config.kv_offload_ttl
    disk = None
    if config.kv_disk:
        capacity, digest = int(config.kv_disk_gb * GIB), sha256(fingerprint.encode()).digest()
        disk = Disk(Path(config.kv_disk), capacity, digest, layout.page_bytes, ttl_s=ttl_s)
    transfers = TierTransfers(store, slots, disk)
    if disk is not None:
        disk.view = transfers.view
    pays = CopyCost(cost, layout.page_bytes, transfers.measure(), DISK_BYTES_PER_S).pays
    return Offload(layout, slots, pays, disk, ttl_s=ttl_s), transfers


def keep_pool(leases: Leases, transfers: Transfers) -> None:
    """Write what the pool has cached to files, before the engine ends. The latest prefixes come first, because time is limited."""
    offload = leases.source
    if not isinstance(offload, Offload) or offload.files is None:
        return
    blocks, tickets, deadline = reversed(list(leases.prefix.items())), count(1 << 30), time.monotonic() + KEEP_S
    held = offload.held  # by copies of requests that end with the engine: nobody waits for them
    while time.monotonic() < deadline and (part := list(islice(blocks, max(1, offload.room)))):
        for key, group, block in part:
            offload.evicted(key, group, block)
        ended = transfers.step(StepPlan(0, stores=offload.stores(tickets)))
        while transfers.busy and time.monotonic() < deadline:
            time.sleep(0.001)
            ended |= transfers.step(StepPlan(0))
        for ticket, arrived in ended.items():
            offload.ended(ticket, arrived)
        while offload.held > held and time.monotonic() < deadline:
            time.sleep(0.001)


def _refused(config: EngineConfig, name: str, reason: str) -> ConfigError:
    return ConfigError(f"--{name.replace('_', '-')} is {getattr(config, name)}: {reason}.", param=name)
