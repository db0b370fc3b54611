"""Metrics of one engine: counters, gauges, histograms, live figures and the ledger of requests."""

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
