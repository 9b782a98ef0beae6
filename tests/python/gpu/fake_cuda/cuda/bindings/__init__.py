"""Stands in for the package `cuda-bindings` where there is no GPU."""
