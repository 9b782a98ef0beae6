"""Helpers of tests of handlers."""
