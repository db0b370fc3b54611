"""Hardware: published figures of accelerators, detection of this machine, measured bandwidth, energy counters."""
