"""Metrics that handlers record. `context.metrics` is the entrance; what a metric is, the server's `metrics.yaml` says."""
