from __future__ import annotations

from pathlib import Path

from ridgeline.core.memory import allocated_bytes, return_free_memory

SIZE = 32 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_what_malloc_has_handed_out_is_counted() -> None:
    before = allocated_bytes()
    if before is None:  # a C library that does not tell
        return
    held = bytearray(SIZE)
    during = allocated_bytes()
    del held
    after = allocated_bytes()
    assert during is not None and after is not None
    assert during - before > SIZE * 0.9 and during - after > SIZE * 0.9


def test_freed_memory_goes_back_to_the_system() -> None:
    """Small pieces, with one that stays behind them, so that nothing but the order to do so gives them back."""
    pieces = [bytes(1000) for _ in range(SIZE // 1000)]
    last = bytes(1000)
    del pieces
    before = resident_bytes()
    return_free_memory()
    assert resident_bytes() <= before and len(last) == 1000
