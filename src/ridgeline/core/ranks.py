"""How units that cannot be divided are shared by ranks."""

from __future__ import annotations

from ridgeline.core.errors import ConfigError


def units_on_rank(units: int, ranks: int) -> int:
    """Number of units (such as KV heads), of `units` indivisible ones, that each of `ranks` ranks holds.

    With fewer units than ranks, neighbouring ranks hold copies of a unit: query heads are always divided, and each needs its KV
    head on its rank. Copies cost cache bytes, but without them most models with grouped heads could not run on many devices.
    Raises ConfigError where neither number divides the other.
    """
    if units % ranks and ranks % units:
        raise ConfigError(
            f"{units} heads or blocks cannot be split over {ranks} devices: use a divisor or a multiple of {units}."
        )
    return max(1, units // ranks)
