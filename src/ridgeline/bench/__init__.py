"""The load generator: requests (workload, traces), sending (load), results (record, figures, report)."""
