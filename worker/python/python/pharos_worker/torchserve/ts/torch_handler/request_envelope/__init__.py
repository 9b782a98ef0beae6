"""Envelopes: convert request formats of other servers to and from a handler's list of items."""
