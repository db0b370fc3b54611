"""What an operator sees: counters, gauges and histograms of one engine, its live figures, and a ledger of requests."""

from ridgeline.metrics.exposition import CONTENT_TYPE
from ridgeline.metrics.live import Ceilings, Live
from ridgeline.metrics.metrics import Metrics
from ridgeline.metrics.records import Arrival, RequestRecord, Spent, StepRecord, Totals

__all__ = [
    "CONTENT_TYPE",
    "Arrival",
    "Ceilings",
    "Live",
    "Metrics",
    "RequestRecord",
    "Spent",
    "StepRecord",
    "Totals",
]
