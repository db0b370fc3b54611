"""The load generator: what is asked (workload), how it is sent (load), what came of it (record, figures, report)."""
