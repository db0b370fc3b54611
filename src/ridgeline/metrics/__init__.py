"""What an operator sees: counters, gauges and histograms of one engine, in Prometheus's text format."""

from ridgeline.metrics.metrics import CONTENT_TYPE, Metrics
from ridgeline.metrics.records import RequestRecord, StepRecord

__all__ = ["CONTENT_TYPE", "Metrics", "RequestRecord", "StepRecord"]
