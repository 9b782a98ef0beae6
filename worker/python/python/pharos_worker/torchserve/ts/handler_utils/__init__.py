"""Utilities for handlers of large models and for micro-batching."""
