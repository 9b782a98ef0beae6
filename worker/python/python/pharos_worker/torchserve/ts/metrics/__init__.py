"""Metrics of handlers, recorded through `context.metrics` and defined by the server's `metrics.yaml`."""
