"""Helpers for handlers."""
